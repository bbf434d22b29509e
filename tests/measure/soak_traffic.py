"""Requests of a soak: greedy ones with compared answers, sampled ones, ones with a schema, and aborted ones."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
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


@dataclass(slots=True)
class SoakQuestion:
    """A prompt with its answer's length, and the greedy answer to it alone."""

    text: str
    new_tokens: int
    alone: str = ""


@dataclass(slots=True)
class SoakCounts:
    """Outcomes of the requests.

    whole: complete answers, by kind. failures: by HTTP status or fault, of all kinds. compared: greedy answers compared
    with the first ones. examples: some faults, in words.
    """

    asked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    whole: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    failures: dict[str, int] = field(default_factory=dict)
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

    def count(self, kind: str, question: SoakQuestion, reply: Reply) -> None:
        """Count a request's outcome."""
        if reply.failure:
            if reply.failure != "aborted":
                self.failures[reply.failure] = self.failures.get(reply.failure, 0) + 1
                if reply.failure != TURNED_AWAY:
                    self.note(f"{kind}: {reply.failure} {reply.detail}")
            return
        self.whole[kind] += 1
        if kind == "greedy":
            self.compared += 1
            if reply.text != question.alone:
                self.changed += 1
                said = f"alone {question.alone!r}, under load {reply.text!r}"
                self.note(f"changed: {question.text[:60]!r}: {said}")
        elif kind == "schema" and reply.finish_reason == "stop" and not _follows_schema(reply.text):
            self.against_schema += 1
            self.note(f"against the schema: {reply.text!r}")


def body_of(kind: str, question: SoakQuestion, draw: random.Random) -> dict[str, Any]:
    """The body of a request of this kind."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": question.text}], "max_tokens": question.new_tokens,
        "temperature": 0.0, "stream": draw.random() < 0.5,
    }  # fmt: skip
    if kind == "sampled":
        body |= {"temperature": draw.uniform(0.2, 1.5), "top_p": draw.choice([1.0, 0.9, 0.5])}
        if draw.random() < 0.5:
            body["seed"] = draw.randrange(1 << 31)
        if draw.random() < 0.3:
            body |= {"presence_penalty": draw.uniform(0, 2), "frequency_penalty": draw.uniform(0, 2)}
        if draw.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": draw.randrange(6)}
    elif kind == "schema":
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        body |= {"max_tokens": 2 * question.new_tokens, "response_format": schema}
    if kind in ("schema", "given up"):
        body["temperature"] = draw.choice([0.0, 1.0])
    return body


async def ask_alone(remote: Remote, questions: Sequence[SoakQuestion], timeout: float) -> list[str]:
    """Ask the questions one at a time and keep their greedy answers; returns the failures, in words."""
    failures = []
    for question in questions:
        body = body_of("greedy", question, random.Random(0)) | {"stream": False}
        reply = await remote.ask(CHAT, body, timeout=timeout)
        question.alone = reply.text
        if reply.failure:
            failures.append(f"{reply.failure}: {reply.detail}")
    return failures


async def press(
    remote: Remote, questions: Sequence[SoakQuestion], counts: SoakCounts, *, concurrency: int, seconds: float,
    seed: int, timeout: float,
) -> None:  # fmt: skip
    """Keep `concurrency` requests of all kinds in flight for `seconds`, and wait for the last; fills in counts."""
    end = time.monotonic() + seconds

    async def one_client(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        while time.monotonic() < end:
            kind = draw.choices([*KINDS], [*KINDS.values()])[0]
            question = draw.choice(questions)
            abort_after = draw.expovariate(0.5) if kind == "given up" else None
            counts.asked[kind] += 1
            body = body_of(kind, question, draw)
            reply = await remote.ask(CHAT, body, timeout=timeout if abort_after is None else abort_after)
            if abort_after is not None and reply.failure == "timeout":
                reply.failure = "aborted"
            counts.count(kind, question, reply)
            if reply.failure == TURNED_AWAY:
                await asyncio.sleep(PAUSE_SECONDS * (1 + draw.random()))

    await asyncio.gather(*(one_client(number) for number in range(concurrency)))


def _follows_schema(text: str) -> bool:
    try:
        return Draft202012Validator(SCHEMA).is_valid(json.loads(text))
    except ValueError:
        return False
