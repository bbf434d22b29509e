"""The cost of a prefill: seconds of a chunk by its tokens and the context before them.

A forward that reads n prompt tokens after c cached ones takes some time whatever n is (the weights are read), some for
each token, and some for each pair of a token and one that it attends to, of which there are about n * (c + n / 2). So
late chunks of a long prompt cost several times what its first ones do.

The three rates are the state of a Kalman filter, as in `drift.py`: measured chunks of a profile and chunks that are
served both move it, so a server without measurements learns them within a few prompts.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

NOISE = 0.2
"""Standard deviation of a chunk's time, as a share of it."""
UNKNOWN, KNOWN = 1.0, 0.2
"""Standard deviation of each rate, as a share of it: before the first chunks, and of a walk at most."""
TOGETHER, APART = 0.01, 0.02
"""Standard deviations of a step of the walk, as shares: of all rates together, and of each alone."""
LEAST_SHARE = 1e-3
"""A rate keeps this share of the first guess at least, so that it can grow again."""
TOKENS_TO_PAIRS = 8192
"""First guess: tokens of context that cost a token as much as everything else."""
PASSES = 4
"""Times that a profile's chunks are shown to the filter."""
LEAST_CHUNK, MOST_LEAST = 16, 512
"""Bounds of `PrefillCost.least`, in tokens."""


def pairs_of(lengths: Sequence[int], contexts: Sequence[int]) -> float:
    """Pairs of tokens that attend in a forward of prompts of `lengths` tokens after `contexts` cached ones."""
    return sum(length * (context + length / 2) for length, context in zip(lengths, contexts, strict=True))


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A measured chunk of one prompt: tokens, cached tokens before them, seconds."""

    tokens: int
    context: int
    seconds: float

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.context < 0 or not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"a measured prefill needs tokens >= 1, context >= 0, seconds > 0; got {self}")

    def to_json(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "context": self.context, "seconds": self.seconds}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Raises ValueError saying what is wrong with `data`."""
        try:
            return cls(int(data["tokens"]), int(data["context"]), float(data["seconds"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"a measured prefill has tokens, context, seconds; got {data!r}") from error


class PrefillCost:
    """The cost of prefill of one engine. points: measured before; without any it says nothing until `observe`."""

    def __init__(self, points: Iterable[PrefillPoint] = ()):
        self._rates = np.zeros(3)  # seconds of a forward, a token, a pair
        self._least = np.zeros(3)
        self._covariance = np.zeros((3, 3))  # of the rates as shares of themselves
        for _ in range(PASSES):
            for point in points:
                self.observe(point.tokens, pairs_of([point.tokens], [point.context]), point.seconds)

    @property
    def known(self) -> bool:
        """True once a chunk was seen."""
        return bool(self._rates.any())

    @property
    def least(self) -> int:
        """Tokens of the smallest chunk worth a forward: its tokens take as long as what every forward takes."""
        forward, token, _ = self._rates.tolist()
        return int(min(max(forward / token, LEAST_CHUNK), MOST_LEAST)) if token else LEAST_CHUNK

    def seconds(self, tokens: int, pairs: float) -> float:
        """Seconds of a forward that reads `tokens` prompt tokens, of which `pairs` attend (`pairs_of`)."""
        return float(self._rates @ (1.0, tokens, pairs))

    def largest(self, seconds: float, context: int) -> int:
        """Tokens of the largest chunk after `context` cached tokens that takes at most `seconds`; 0 where none does."""
        forward, token, pair = self._rates.tolist()
        room, linear = seconds - forward, token + pair * context
        if room <= 0 or linear <= 0:
            return 0
        return int(2 * room / (linear + math.sqrt(linear * linear + 2 * pair * room)))

    def observe(self, tokens: int, pairs: float, seconds: float) -> None:
        """Learn from a forward that took `seconds`. Impossible times are ignored."""
        if tokens < 1 or not (math.isfinite(seconds) and seconds > 0):
            return
        if not self.known:
            self._rates = seconds / 2 * np.array([1.0, 1.0 / tokens, 1.0 / tokens / TOKENS_TO_PAIRS])
            self._least = self._rates * LEAST_SHARE
            self._covariance = np.eye(3) * UNKNOWN**2
        parts = self._rates * (1.0, tokens, pairs)
        predicted = float(parts.sum())
        shares = parts / predicted
        toward = self._covariance @ shares
        total = float(shares @ toward) + NOISE**2
        bound = math.sqrt(total)  # a hiccup counts as a usual deviation
        surprise = min(max(seconds / predicted - 1.0, -bound), bound)
        self._covariance -= np.outer(toward, toward) / total
        moved = np.maximum(1.0 + toward / total * surprise, 0.05)
        self._rates = np.maximum(self._rates * moved, self._least)
        self._walk()

    def _walk(self) -> None:
        """Widen the covariance by what rates may change until the next chunk; a known rate stays known."""
        if self._covariance.diagonal().max() < KNOWN**2:
            self._covariance += TOGETHER**2 + np.eye(3) * APART**2
