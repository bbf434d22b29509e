"""Contents of requests: prompts from files, or made-up text of given lengths in the server's own tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np

from ...errors import UserError
from ...prompt_files import BUILT_IN, read_mixed_questions
from ..remote import CHAT, Remote
from .arrivals import BLOCK_TOKENS, Traced
from .scenario import Length, Requests, Scenario

CALIBRATION_WORDS = (64, 512)
"""Prompts of so many words tell how many tokens a word has."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, ready to be sent. name: of its kind."""

    name: str
    body: Mapping[str, Any]

    @property
    def level(self) -> float | None:
        """Its service level, tokens per second."""
        return self.body.get("min_tokens_per_second")


@dataclass(frozen=True, slots=True)
class Counting:
    """The server's tokens of a prompt of made-up text: `fixed` and `per_word` for each word."""

    fixed: float
    per_word: float

    def words(self, tokens: float) -> int:
        return max(1, round((tokens - self.fixed) / self.per_word))

    @classmethod
    async def of(cls, remote: Remote, timeout: float) -> Self:
        """Ask the server how it counts; raises UserError where it does not say."""
        counted = []
        rng = np.random.default_rng(0)
        for count in CALIBRATION_WORDS:
            asked = body(made_up(rng, count), 1, {"temperature": 0.0, "stream": False})
            reply = await remote.ask(CHAT, asked, timeout=timeout)
            if reply.failure or not reply.prompt_tokens:
                raise UserError(f"the server does not count a prompt's tokens: {reply.failure} {reply.detail}")
            counted.append(reply.prompt_tokens)
        per_word = (counted[1] - counted[0]) / (CALIBRATION_WORDS[1] - CALIBRATION_WORDS[0])
        return cls(counted[0] - per_word * CALIBRATION_WORDS[0], per_word)


class Workload:
    """Makes the requests of a scenario, of the same kinds and lengths for the same seed."""

    def __init__(self, scenario: Scenario, counting: Counting | None, turn: Sequence[int] = ()) -> None:
        """counting: needed where text is made up. turn: numbers of a measurement. Each has texts of its own, which no
        earlier one has left in a server's cache. Raises UserError where a file holds no prompts."""
        self.scenario = scenario
        self.counting = counting
        self.texts = np.random.default_rng([scenario.seed, *turn])
        self.questions = [
            one.texts or read_mixed_questions(one.prompts or [BUILT_IN]) if one.input_tokens is None else []
            for one in scenario.requests
        ]

    def mixed(self, rng: np.random.Generator) -> Iterator[Ask]:
        """Requests of all kinds by their weights, without end."""
        weights = np.array([one.weight for one in self.scenario.requests])
        order = [0] * len(weights)
        while True:
            kind = int(rng.choice(len(weights), p=weights / weights.sum()))
            one = self.scenario.requests[kind]
            if one.input_tokens is not None:
                text = made_up(self.texts, self._words(draw(one.input_tokens, rng) - one.shared_prefix_tokens))
            else:
                text = self.questions[kind][order[kind] % len(self.questions[kind])]
                order[kind] += 1
            if one.shared_prefix_tokens:
                text = f"{self._block(kind, one.shared_prefix_tokens)} {text}"
            yield self._ask(one, text, draw(one.output_tokens, rng))

    def traced(self, traced: Traced) -> Ask:
        """A request of a trace; of text that it does not have, some is made up."""
        text = traced.prompt
        if not text:
            shared = " ".join(self._block(block, BLOCK_TOKENS) for block in traced.blocks[:-1])
            rest = traced.input_tokens - BLOCK_TOKENS * max(0, len(traced.blocks) - 1)
            text = f"{shared} {made_up(self.texts, self._words(rest))}".strip()
        return self._ask(self.scenario.requests[0], text, traced.output_tokens)

    def _ask(self, one: Requests, text: str, output_tokens: int) -> Ask:
        return Ask(one.name, body(text, output_tokens, {**self.scenario.body, **one.body}))

    def _words(self, tokens: float) -> int:
        assert self.counting is not None
        return self.counting.words(tokens)

    def _block(self, number: int, tokens: int) -> str:
        """The same text for the same number."""
        assert self.counting is not None
        return made_up(np.random.default_rng(number), max(1, round(tokens / self.counting.per_word)))


def needs_counting(scenario: Scenario, trace: list[Traced]) -> bool:
    """True if text has to be made up."""
    of_mix = not trace and any(one.input_tokens or one.shared_prefix_tokens for one in scenario.requests)
    return of_mix or any(not traced.prompt for traced in trace)


def draw(length: Length, rng: np.random.Generator) -> int:
    """Tokens, by the length's distribution."""
    if length.mean is None:
        return round(length.min * (length.max / length.min) ** rng.random())
    return int(np.clip(round(rng.normal(length.mean, length.stdev)), length.min, length.max))


def made_up(rng: np.random.Generator, words: int) -> str:
    """Words of real prompts in an order that no cache has seen."""
    return " ".join(rng.choice(_vocabulary(), words))


@cache
def _vocabulary() -> list[str]:
    words = {word for question in read_mixed_questions([BUILT_IN]) for word in question.split()}
    return sorted(word for word in words if word.isalpha() and word.isascii())


def body(text: str, output_tokens: int, more: Mapping[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": output_tokens, "stream": True, **more}
