"""How many draft states a forward has: as many, over all requests, as pay for themselves.

A forward over R open blocks brings R steps, and one more for each draft that is accepted. It takes a + b rows seconds.
What is admitted raises steps per second; none at all is one of the choices. What a plan looks at (scores, times, other
requests) changes which states are drafted, and no text: a draft is accepted where it is the state that base decoding
comes to (`lookup.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BINS, DEPTHS = 10, 4
PRIOR = 4.0
"""Weight of a score, taken as a chance, in drafts observed."""
MEMORY = 0.99
"""Weight of the past when a round is added to it."""
TRIAL = 32
"""Rounds in which once nothing, and once everything is drafted, so that there is something to compare."""


class Acceptance:
    """How often drafts are accepted, by score and by steps ahead, learnt as they are."""

    def __init__(self) -> None:
        middles = (np.arange(BINS) + 0.5) / BINS
        chances = np.stack([middles ** (depth + 1) for depth in range(DEPTHS)])
        self._seen = np.full((DEPTHS, BINS), PRIOR)
        self._accepted = PRIOR * chances

    def chances(self, scores: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """[n] in 0..1, of drafts with `scores` [n] that are `depths` [n] steps ahead, counted from 1."""
        at = _cells(scores, depths)
        chances: np.ndarray = self._accepted[at] / self._seen[at]
        return chances

    def observe(self, scores: np.ndarray, depths: np.ndarray, accepted: np.ndarray) -> None:
        """What became of drafts; accepted: [n] bool."""
        at = _cells(scores, depths)
        np.add.at(self._seen, at, 1.0)
        np.add.at(self._accepted, at, accepted.astype(float))


def _cells(scores: np.ndarray, depths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.minimum(depths, DEPTHS) - 1, np.minimum((scores * BINS).astype(np.int64), BINS - 1)


class RoundCost:
    """Seconds of a round by its rows, a line through those of late."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # weight, rows, seconds, rows², rows × seconds

    @property
    def known(self) -> bool:
        """Whether rounds of different sizes were seen."""
        weight, rows, _, squares, _ = self._sums
        return bool(weight > 8 and weight * squares - rows * rows > 1e-6 * weight * weight)

    def observe(self, rows: int, seconds: float) -> None:
        """A round took so long."""
        self._sums = MEMORY * self._sums + np.array([1.0, rows, seconds, rows * rows, rows * seconds])

    def seconds(self, rows: np.ndarray) -> np.ndarray:
        """[n] seconds of rounds of `rows` [n]; they never fall with more rows, and are above 0."""
        weight, x, y, xx, xy = self._sums
        slope = max((weight * xy - x * y) / (weight * xx - x * x), 0.0)
        line: np.ndarray = np.maximum((y + slope * (weight * rows - x)) / weight, 1e-9)
        return line


def best_count(open_blocks: int, rows: int, chances: np.ndarray, sizes: np.ndarray, cost: RoundCost) -> int:
    """How many of n drafts bring the most steps per second; 0 where none pays.

    rows: of the round without drafts. chances: [n], of drafts in the order of admission. sizes: [n], rows of each.
    """
    steps = open_blocks + np.append(0.0, np.cumsum(chances))
    seconds = cost.seconds(rows + np.append(0, np.cumsum(sizes)))
    return int((steps / seconds).argmax())


class StatePlanner:
    """Decides in each round what is drafted for whom, by the chances of the drafts and what earlier rounds took."""

    def __init__(self) -> None:
        self.cost = RoundCost()
        self._rounds = 0

    def admit(
        self, open_blocks: int, rows: int, chances: Sequence[np.ndarray], sizes: Sequence[np.ndarray]
    ) -> list[int]:
        """How many drafts each request has, the first ones in its order.

        chances, sizes: of each request, [n] chances of its drafts in their order of admission, and rows that they take.
        """
        self._rounds += 1
        trial = self._rounds % TRIAL
        if trial == 0:
            return [0] * len(chances)
        if not self.cost.known or trial == TRIAL // 2:
            return [len(own) for own in chances]
        # A draft is no better than those before it that it needs, so that each request's come in their order.
        worth = [np.minimum.accumulate(own / size) for own, size in zip(chances, sizes, strict=True)]
        owner = np.repeat(np.arange(len(worth)), [len(own) for own in worth])
        order = np.argsort(-np.concatenate(worth), kind="stable")
        taken = best_count(open_blocks, rows, np.concatenate(chances)[order], np.concatenate(sizes)[order], self.cost)
        return np.bincount(owner[order[:taken]], minlength=len(worth)).tolist()
