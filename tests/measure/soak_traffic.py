"""Requests of a soak: greedy answers that are compared, sampled ones, ones that follow a schema, and ones given up."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import soak_attacks
from jsonschema import Draft202012Validator
from soak_attacks import ATTACKS, Attacked, Attacker

from outrider.server.bench.remote import CHAT, Remote, Reply

KINDS = {"greedy": 4, "sampled": 2, "schema": 2, "given up": 2}
"""Relative frequency of each kind."""
COMPARED = ("greedy", "sampled")
"""Kinds whose waits are compared without attackers and beside them."""
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "score": {"type": "integer", "minimum": 0, "maximum": 100},
        "kind": {"enum": ["question", "task", "other"]},
    },
    "required": ["title", "score", "kind"],
    "additionalProperties": False,
}
TURNED_AWAY = "429"
"""The status that is no failure of the server: it is asked again later."""
PAUSE_SECONDS = 0.5
SHOWN = 5
"""Examples kept of what went wrong."""


@dataclass(frozen=True, slots=True)
class SoakQuestion:
    """A prompt with its answer's length, and the greedy answer that it got alone."""

    text: str
    new_tokens: int
    alone: str = ""

    def body(self) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": self.text}],
            "max_tokens": self.new_tokens,
            "temperature": 0.0,
        }


@dataclass(slots=True)
class SoakCounts:
    """Outcomes of the requests.

    whole: answers that came to their end, by kind. failures: by HTTP status or what broke, of all kinds. compared:
    greedy answers held against the same prompt's alone. examples: some of what went wrong, in words. waits: seconds of
    whole greedy and sampled answers, of those that began without attackers and of those that began beside some.
    """

    asked: Counter[str] = field(default_factory=Counter)
    whole: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    changed: int = 0
    against_schema: int = 0
    examples: list[str] = field(default_factory=list)
    waits: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    under_attack: bool = False

    @property
    def broken(self) -> int:
        """Requests that a right server would have answered."""
        return sum(count for failure, count in self.failures.items() if failure != TURNED_AWAY)

    def note(self, example: str) -> None:
        if len(self.examples) < SHOWN:
            self.examples.append(example)


async def ask_alone(
    remote: Remote, questions: Sequence[SoakQuestion], timeout: float
) -> tuple[list[SoakQuestion], list[str]]:
    """The questions with their greedy answers, asked one at a time; what failed instead, in words."""
    answered, failures = [], []
    for question in questions:
        reply = await remote.ask(CHAT, question.body(), timeout=timeout)
        if reply.failure:
            failures.append(f"{reply.failure}: {reply.detail}")
        answered.append(SoakQuestion(question.text, question.new_tokens, reply.text))
    return answered, failures


async def press(
    remote: Remote,
    questions: Sequence[SoakQuestion],
    *,
    concurrency: int,
    seconds: float,
    seed: int,
    timeout: float,
    counts: SoakCounts,
    attacked: Attacked | None = None,
    stretch: float = 60.0,
) -> None:
    """Keep `concurrency` requests of all kinds in flight for `seconds`, and wait for the last; counts is filled in.

    attacked: filled in by as many further clients as there are kinds of attack, each of which attacks in every other
    stretch of so many seconds.
    """
    began = time.monotonic()
    end = began + seconds

    async def one_client(number: int) -> None:
        random_ = random.Random(f"{seed} {number}")
        while time.monotonic() < end:
            kind = random_.choices([*KINDS], [*KINDS.values()])[0]
            question = random_.choice(questions)
            failure = await _ASKING[kind](remote, question, random_, timeout, counts)
            if failure == TURNED_AWAY:
                await asyncio.sleep(PAUSE_SECONDS * (1 + random_.random()))

    async def one_attacker(kind: str, attacked: Attacked) -> None:
        attacker = Attacker(remote, kind, seed, timeout, attacked)
        while time.monotonic() < end:
            if counts.under_attack:
                await attacker.attack()
            await asyncio.sleep(soak_attacks.PAUSE_SECONDS)

    async def alternate() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(0.1)
            counts.under_attack = int((time.monotonic() - began) / stretch) % 2 == 1

    clients = [one_client(number) for number in range(concurrency)]
    if attacked is None:
        await asyncio.gather(*clients)
        return
    health = asyncio.create_task(soak_attacks.watch_health(remote, attacked, lambda: counts.under_attack))
    await asyncio.gather(*clients, alternate(), *(one_attacker(kind, attacked) for kind in ATTACKS))
    health.cancel()


async def _ask(
    kind: str,
    remote: Remote,
    body: dict[str, Any],
    timeout: float,
    counts: SoakCounts,
    abort_after: float | None = None,
) -> Reply:
    counts.asked[kind] += 1
    attacked = counts.under_attack
    reply = await remote.ask(CHAT, body, timeout=timeout, abort_after=abort_after)
    if not reply.failure:
        counts.whole[kind] += 1
        if kind in COMPARED:
            counts.waits[attacked].append(reply.seconds)
    elif reply.failure != "aborted":
        counts.failures[reply.failure] += 1
        if reply.failure != TURNED_AWAY:
            counts.note(f"{kind}: {reply.failure} {reply.detail}")
    return reply


async def _greedy(
    remote: Remote, question: SoakQuestion, random_: random.Random, timeout: float, counts: SoakCounts
) -> str:
    body = question.body() | {"stream": random_.random() < 0.5}
    reply = await _ask("greedy", remote, body, timeout, counts)
    if not reply.failure:
        counts.compared += 1
        if reply.text != question.alone:
            counts.changed += 1
            counts.note(f"changed: {question.text[:60]!r}: alone {question.alone!r}, under load {reply.text!r}")
    return reply.failure


async def _sampled(
    remote: Remote, question: SoakQuestion, random_: random.Random, timeout: float, counts: SoakCounts
) -> str:
    body = question.body() | {
        "temperature": random_.uniform(0.2, 1.5),
        "top_p": random_.choice([1.0, 0.9, 0.5]),
        "stream": random_.random() < 0.5,
    }
    if random_.random() < 0.5:
        body["seed"] = random_.randrange(1 << 31)
    if random_.random() < 0.3:
        body |= {"presence_penalty": random_.uniform(0, 2), "frequency_penalty": random_.uniform(0, 2)}
    if random_.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": random_.randrange(6)}
    return (await _ask("sampled", remote, body, timeout, counts)).failure


async def _schema(
    remote: Remote, question: SoakQuestion, random_: random.Random, timeout: float, counts: SoakCounts
) -> str:
    body = question.body() | {
        "max_tokens": 2 * question.new_tokens,
        "temperature": random_.choice([0.0, 1.0]),
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
        "stream": random_.random() < 0.5,
    }
    reply = await _ask("schema", remote, body, timeout, counts)
    if not reply.failure and reply.finish_reason == "stop" and not _follows_schema(reply.text):
        counts.against_schema += 1
        counts.note(f"against the schema: {reply.text!r}")
    return reply.failure


async def _given_up(
    remote: Remote, question: SoakQuestion, random_: random.Random, timeout: float, counts: SoakCounts
) -> str:
    body = question.body() | {"stream": random_.random() < 0.7, "temperature": random_.choice([0.0, 1.0])}
    reply = await _ask("given up", remote, body, timeout, counts, abort_after=random_.expovariate(0.5))
    return reply.failure


def _follows_schema(text: str) -> bool:
    try:
        return Draft202012Validator(SCHEMA).is_valid(json.loads(text))
    except ValueError:
        return False


_ASKING: dict[str, Callable[..., Any]] = {
    "greedy": _greedy,
    "sampled": _sampled,
    "schema": _schema,
    "given up": _given_up,
}
