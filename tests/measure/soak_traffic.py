"""Requests of a soak: greedy ones with compared answers, sampled ones, ones with a schema, and aborted ones."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jsonschema import Draft202012Validator

from outrider.server.bench.remote import CHAT, Remote, Reply

KINDS = {"greedy": 4, "sampled": 2, "schema": 2, "given up": 2}
"""Relative frequency of each kind."""
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
"""This status is no failure; the request is sent again later."""
PAUSE_SECONDS = 0.5
SHOWN = 5
"""Examples of faults to keep."""


@dataclass(frozen=True, slots=True)
class SoakQuestion:
    """A prompt with its answer's length, and the greedy answer to it alone."""

    text: str
    new_tokens: int
    alone: str = ""

    def body(self) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": self.text}], "max_tokens": self.new_tokens, "temperature": 0.0}


@dataclass(slots=True)
class SoakCounts:
    """Outcomes of the requests.

    whole: complete answers, by kind. failures: by HTTP status or fault, of all kinds. compared: greedy answers compared
    with the first ones. examples: some faults, in words.
    """

    asked: Counter[str] = field(default_factory=Counter)
    whole: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    changed: int = 0
    against_schema: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def broken(self) -> int:
        """Requests that a correct server would have answered."""
        return sum(count for failure, count in self.failures.items() if failure != TURNED_AWAY)

    def note(self, example: str) -> None:
        if len(self.examples) < SHOWN:
            self.examples.append(example)


async def ask_alone(
    remote: Remote, questions: Sequence[SoakQuestion], timeout: float
) -> tuple[list[SoakQuestion], list[str]]:
    """The questions with their greedy answers, sent one at a time; the fault instead, in words, if one fails."""
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
) -> None:
    """Keep `concurrency` requests of all kinds in flight for `seconds`, and wait for the last; fills in counts."""
    end = time.monotonic() + seconds

    async def one_client(number: int) -> None:
        random_ = random.Random(f"{seed} {number}")
        while time.monotonic() < end:
            kind = random_.choices([*KINDS], [*KINDS.values()])[0]
            question = random_.choice(questions)
            failure = await _ASKING[kind](remote, question, random_, timeout, counts)
            if failure == TURNED_AWAY:
                await asyncio.sleep(PAUSE_SECONDS * (1 + random_.random()))

    await asyncio.gather(*(one_client(number) for number in range(concurrency)))


async def _ask(
    kind: str,
    remote: Remote,
    body: dict[str, Any],
    timeout: float,
    counts: SoakCounts,
    abort_after: float | None = None,
) -> Reply:
    counts.asked[kind] += 1
    reply = await remote.ask(CHAT, body, timeout=timeout, abort_after=abort_after)
    if not reply.failure:
        counts.whole[kind] += 1
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
    "greedy": _greedy, "sampled": _sampled, "schema": _schema, "given up": _given_up,
}  # fmt: skip
