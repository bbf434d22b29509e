"""The cost of a prefill: seconds of a chunk by its tokens and the context before them.

A forward that reads n prompt tokens after c cached ones takes a fixed time (it reads the weights), a time for each
token, and a time for each pair of a token and one that it attends to: n * (c + n / 2) pairs. So late chunks of a long
prompt cost several times as much as the first.

These three rates are the least-squares fit to the latest chunks, drawn slightly toward the proportions of the profile's
rates: a machine that becomes slower at short prompts is expected to be slower at long ones too. Without a profile a
server learns the rates within a few prompts.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

MEMORY = 0.8
"""Weight of a chunk, relative to the next one's."""


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
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Self:
        return cls(int(data["tokens"]), int(data["context"]), float(data["seconds"]))


class PrefillCost:
    """The cost of prefill of one engine. points: a profile's; without any the cost is unknown until `observe`."""

    def __init__(self, points: Iterable[PrefillPoint] = ()):
        self._rates = np.zeros(3)  # seconds of a forward, a token, a pair
        # A guess: a forward costs as much as 32 tokens, a token as much as 2048 pairs; and its weight, in chunks.
        self._proportions, self._trust = np.array([32.0, 1.0, 1 / 2048]), 0.003
        self._squares, self._products = np.zeros((3, 3)), np.zeros(3)  # of the least squares
        rows = [_parts(one.tokens, pairs_of([one.tokens], [one.context])) / one.seconds for one in points]
        if rows:
            self._squares, self._products = np.transpose(rows) @ rows, np.sum(rows, axis=0)
            self._fit()
            self._proportions, self._trust, mean = self._rates, 0.3, np.mean(rows, axis=0)
            self._squares, self._products = np.outer(mean, mean) / (1 - MEMORY), mean / (1 - MEMORY)

    @property
    def known(self) -> bool:
        """True once a chunk was seen."""
        return bool(self._rates.any())

    @property
    def forward(self) -> float:
        """Seconds that every forward takes."""
        return float(self._rates[0])

    def seconds(self, tokens: int, pairs: float) -> float:
        """Seconds of a forward that reads `tokens` prompt tokens, of which `pairs` attend (`pairs_of`)."""
        return float(self._rates @ _parts(tokens, pairs))

    def largest(self, seconds: float, context: int) -> int:
        """Tokens of the largest chunk after `context` cached tokens that takes at most `seconds`; 0 where none does."""
        forward, token, pair = self._rates.tolist()
        room, linear = seconds - forward, token + pair * context
        return int(2 * room / (linear + math.sqrt(linear * linear + 2 * pair * room))) if room > 0 else 0

    def observe(self, tokens: int, pairs: float, seconds: float) -> None:
        """Learn from a forward that took `seconds`. It counts as at most twice as long as predicted, so that one hiccup
        changes little. Impossible times are ignored."""
        if tokens < 1 or not (math.isfinite(seconds) and seconds > 0):
            return
        parts, predicted = _parts(tokens, pairs), self.seconds(tokens, pairs) or seconds
        parts /= predicted
        self._squares = MEMORY * self._squares + np.outer(parts, parts)
        self._products = MEMORY * self._products + parts * min(seconds / predicted, 2.0)
        self._fit()

    def _fit(self) -> None:
        """Minimise the squares, with rates in units of the proportions. A rate keeps a tenth of its proportion."""
        per = self._proportions
        squares, products = self._squares * np.outer(per, per), self._products * per
        scale = products.sum() / squares.sum()
        squares += np.eye(3) * self._trust / scale**2
        products += self._trust / scale
        free, rates = [0, 1, 2], np.linalg.solve(squares, products)
        while rates.min() < 0:  # no rate is negative
            free.remove(int(rates.argmin()))
            rates = np.zeros(3)
            rates[free] = np.linalg.solve(squares[np.ix_(free, free)], products[free])
        self._rates = np.maximum(rates, 0.1 * scale) * per


def _parts(tokens: int, pairs: float) -> np.ndarray:
    """[3], how often each rate counts."""
    return np.array([1.0, tokens, pairs])
