"""Admission of a round's drafts: those with the most steps per second, after the service levels.

Drafts of all requests are put into one order, each request's in their own, and the first n of it are admitted. What is
compared are all n, none among them.

Service levels (`service_levels.py`): a round keeps a level if it is expected to bring the request as many tokens, per
second of the round, as it asked for. As many levels are kept as any choice keeps; only then steps per second count.
So a level that can be kept bounds the round, and one that none keeps bounds nothing. Two orders are compared then: the
drafts that pay first, those of requests behind their level before others; and all drafts of those behind first, then of
those with a level, since a draft that does not pay for all may do so for its request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..service_levels import MARGIN

Seconds = Callable[[np.ndarray], np.ndarray]
"""A function from the rows [n] that drafts add to a round to its seconds [n]."""


@dataclass(frozen=True, slots=True)
class Levels:
    """asked: [R] tokens per second; 0: no level. late: [R] bool, slower so far. step_tokens: that a step reveals."""

    asked: np.ndarray
    late: np.ndarray
    step_tokens: float


@dataclass(frozen=True, slots=True)
class Admitted:
    """counts: [R] drafts of each request. steps, seconds: expected of the round. without: seconds without drafts."""

    counts: np.ndarray
    steps: float
    seconds: float
    without: float


@dataclass(frozen=True, slots=True, eq=False)
class _Drafts:
    """[n] of all requests: whose they are, chances that they are accepted, rows that they cost."""

    owners: np.ndarray
    chances: np.ndarray
    sizes: np.ndarray

    def of(self, order: np.ndarray) -> _Drafts:
        return _Drafts(self.owners[order], self.chances[order], self.sizes[order])


def admitted(
    chances: Sequence[np.ndarray], sizes: Sequence[np.ndarray], seconds: Seconds, levels: Levels | None = None
) -> Admitted:
    """The admitted drafts of R requests.

    chances, sizes: of each request, [n] chances of its drafts in their order of admission, and the mean of the rows
    that they cost. levels: None where nobody asked for one.
    """
    requests = len(chances)
    owners = np.repeat(np.arange(requests), [len(own) for own in chances])
    drafts = _Drafts(owners, np.concatenate(chances), np.concatenate(sizes))
    # A draft is no better than those before it that it needs, so that each request's come in their order.
    worth = np.concatenate([np.minimum.accumulate(own / size) for own, size in zip(chances, sizes, strict=True)])
    most_worth = np.argsort(-worth, kind="stable")
    best = _best(drafts.of(most_worth), requests, seconds, None)
    if levels is not None:
        others, has_none = ~levels.late[owners], (levels.asked == 0)[owners]
        place = np.empty(len(worth), dtype=np.int64)
        place[most_worth] = np.arange(len(worth))
        pays = place < best[1].counts.sum()
        orders = np.lexsort((-worth, others, ~pays)), np.lexsort((-worth, has_none, others))
        best = max((_best(drafts.of(order), requests, seconds, levels) for order in orders), key=lambda found: found[0])
    return best[1]


def _best(
    drafts: _Drafts, requests: int, seconds: Seconds, levels: Levels | None
) -> tuple[tuple[int, float], Admitted]:
    """The best n of one order, and what is compared of it: levels kept, and steps per second."""
    steps = requests + np.append(0.0, np.cumsum(drafts.chances))
    times = seconds(np.append(0.0, np.cumsum(drafts.sizes)))
    speed = steps / times
    kept = np.zeros(len(steps), dtype=np.int64) if levels is None else _kept(drafts, times, levels)
    n = int(np.where(kept == kept.max(), speed, 0.0).argmax())
    counts = np.bincount(drafts.owners[:n], minlength=requests)
    found = Admitted(counts, float(steps[n]), float(times[n]), float(times[0]))
    return (int(kept[n]), float(speed[n])), found


def _kept(drafts: _Drafts, times: np.ndarray, levels: Levels) -> np.ndarray:
    """[n + 1] levels that are kept with the first 0..n drafts, whose rounds take `times`."""
    (who,) = np.nonzero(levels.asked)
    accepted = np.where(drafts.owners == who[:, None], drafts.chances, 0.0).cumsum(1)
    steps = 1.0 + np.pad(accepted, ((0, 0), (1, 0)))
    enough = levels.step_tokens * steps >= MARGIN * levels.asked[who, None] * times
    kept: np.ndarray = enough.sum(0)
    return kept
