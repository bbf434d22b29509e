"""The asynchronous planner's memory: each request's last survivals, and how acceptance compares with them.

Everything is in arrays as large as the engine's request pool (grown to the largest row that was seen) or smaller;
nothing grows with uptime.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

PRIOR_CONFIDENCE = 0.8
"""Before anything was drafted, so that drafting is tried."""
PROFILE_REQUESTS = 512
"""The mean profile follows about the last so many drafted blocks."""
ENOUGH = 64
"""Requests per step that are enough for averages: of steps with n times as many, every n-th is looked at."""
DEPTH = 16
"""Survivals that are kept of each request; a power of two."""
POOL = 64
"""Survivals that are kept of all requests together."""
POOLED = 0.5
"""Survivals of all requests that are used for each of a request's own, see `SurvivalHistory.read`."""
MOST_GROUPS = 64
"""Groups of requests of which something is known."""
STRIDE = 5
"""Distance in the pool from one that is used to the next: neighbours are of one step, and alike."""


class RunningMean:
    """Mean of the rows that were taken in, in which about the last `PROFILE_REQUESTS` count."""

    def __init__(self, start: np.ndarray):
        self.value = start
        self._weight = 0.0

    def take(self, rows: np.ndarray) -> None:
        """Take in [n, ...] float32; an ordinary mean before there are as many."""
        count = len(rows)
        self._weight = min(self._weight + count, max(PROFILE_REQUESTS, count))
        mean = np.ones(count, dtype=np.float32) @ rows / count  # numpy's mean over rows is slower
        self.value += (mean - self.value) * np.float32(count / self._weight)


class Common:
    """Survivals of many requests together: their mean, and the last POOL of them.

    start: [gamma + 1] the record of a request of which nothing is known.
    """

    def __init__(self, start: np.ndarray):
        self.profile = RunningMean(start.copy())
        self._pool = np.tile(start, (POOL, 1))
        self._place = 0

    def take(self, records: np.ndarray) -> None:
        """Take in [n, gamma + 1]."""
        new = records[:POOL]
        self._pool[(self._place + np.arange(len(new))) % POOL] = new
        self._place += len(new)
        self.profile.take(records)

    def some(self, samples: int, requests: int) -> np.ndarray:
        """[samples, requests, gamma + 1] of the pool."""
        more = np.arange(samples * requests).reshape(-1, requests)
        return self._pool[(self._place + STRIDE * more) % POOL]


class SurvivalHistory:
    """The last DEPTH survivals [gamma] of every row, forgotten when the row's generation changes, and those of all
    requests of a group; with each, whether it was a draft of the model.

    prior: confidence that is assumed before anything was written.
    """

    def __init__(self, gamma: int, rows: int = 64, *, prior: float = PRIOR_CONFIDENCE):
        self._start = np.append(prior ** np.arange(1, gamma + 1), 1.0).astype(np.float32)
        self._groups: dict[int, Common] = {}  # the least recently used first
        self._turn = 0
        self._records = np.zeros((rows * DEPTH, gamma + 1), dtype=np.float32)  # row by row; last 1 for drafts, else 0
        self._generations = np.zeros(rows, dtype=np.int64)
        self._counts = np.zeros(rows, dtype=np.int64)  # 0: nothing known of this row
        self._written = np.zeros(rows, dtype=np.int64)  # step of the last one

    def write(
        self,
        rows: np.ndarray,
        generations: np.ndarray,
        survival: np.ndarray,
        step: int,
        drafted: np.ndarray | None = None,
        groups: np.ndarray | None = None,
    ) -> None:
        """Append survival [R, gamma] of requests (rows [R], generations [R]), of that step. drafted: [R] bool, where it
        is of the model's draft; None: everywhere. groups: as of `StepView`."""
        if not len(rows):
            return
        records = np.empty((len(rows), survival.shape[1] + 1), dtype=np.float32)
        records[:, :-1], records[:, -1] = survival, 1.0 if drafted is None else drafted
        counts = self._count(rows, generations)
        place = counts & (DEPTH - 1)
        place += rows * DEPTH
        self._records[place] = records
        counts += 1
        self._counts[rows] = counts
        self._generations[rows] = generations
        self._written[rows] = step
        self._turn += 1
        if self._turn * ENOUGH < len(rows):
            return
        self._turn = 0
        for common, mine in self._commons(groups):
            common.take(records[mine])

    def _commons(self, groups: np.ndarray | None) -> Iterator[tuple[Common, Any]]:
        """The common history of each group, with its place among the requests."""
        for group in (0,) if groups is None else np.unique(groups).tolist():
            self._groups[group] = common = self._groups.pop(group, None) or Common(self._start)
            if len(self._groups) > MOST_GROUPS:
                del self._groups[next(iter(self._groups))]
            yield common, slice(None) if groups is None else np.flatnonzero(groups == group)

    def read(
        self, rows: np.ndarray, generations: np.ndarray, samples: int, groups: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each request's latest survivals, newest first: [samples, R, gamma] float32, a copy. [samples, R]: 1 where it
        was the model's draft, 0 where not. [R] bool: who has any.

        At most DEPTH samples of its own. A request with fewer repeats those it has; one without gets the mean of its
        group. Several are followed by half as many of the group: the next passage of a text is nearer to the mean of
        all than its last few were, and without them a plan rests after every hard passage.
        """
        counts = self._count(rows, generations)
        known = counts > 0
        newest = counts - 1
        if samples > 1:
            back = np.arange(min(samples, DEPTH))[:, None]
            newest = newest - back % np.minimum(np.maximum(counts, 1), DEPTH)
        newest &= DEPTH - 1
        newest += rows * DEPTH
        found = self._records.take(newest, axis=0)
        if samples == 1:
            found = found[None]
        own, more = len(found), int(POOLED * len(found)) if samples > 1 else 0
        if more:
            found = np.concatenate([found, np.empty((more, *found.shape[1:]), dtype=np.float32)])
        if more or np.count_nonzero(known) < len(known):
            for common, mine in self._commons(groups):
                places = np.arange(len(rows))[mine]
                found[:own, places[counts[places] == 0]] = common.profile.value
                if more:
                    found[own:, places] = common.some(more, len(places))
        return found[:, :, :-1], found[:, :, -1], known

    def ages(self, rows: np.ndarray, generations: np.ndarray, step: int) -> np.ndarray:
        """[R] steps since each request's last survivals; 0 for those that have none."""
        return np.where(self._count(rows, generations) > 0, step - self._written[rows], 0)

    def _count(self, rows: np.ndarray, generations: np.ndarray) -> np.ndarray:
        """[R] survivals written for each request; room is made for rows that are new."""
        if not len(rows):
            return rows
        try:
            counts = self._counts[rows]
        except IndexError:
            self._grow(int(rows.max()) + 1)
            counts = self._counts[rows]
        counts *= self._generations[rows] == generations
        return counts

    def _grow(self, rows: int) -> None:
        more = max(rows, 2 * len(self._counts)) - len(self._counts)
        self._records = np.pad(self._records, ((0, more * DEPTH), (0, 0)))
        self._generations, self._counts, self._written = (
            np.pad(array, (0, more)) for array in (self._generations, self._counts, self._written)
        )


class SurvivalDecay:
    """Running mean of the survival of the model's drafts, by draft position."""

    def __init__(self, gamma: int):
        self._profile = RunningMean((PRIOR_CONFIDENCE ** np.arange(1, gamma + 1)).astype(np.float32))

    def write(self, survival: np.ndarray) -> None:
        """Take in survival [n, gamma] of drafts, of at most ENOUGH."""
        if len(survival):
            self._profile.take(survival[:ENOUGH])

    def extrapolate(self, survival: np.ndarray, depth: int, block: int) -> np.ndarray:
        """survival [n, gamma] of drafts of `depth` tokens, with what the mean makes of it up to `block` tokens."""
        found = survival.copy()
        profile = self._profile.value
        share = profile[depth:block] / max(float(profile[depth - 1]), 1e-6)
        unseen = found[:, depth:block]
        unseen[:] = np.where(unseen > 0, unseen, survival[:, depth - 1 : depth] * np.minimum(share, 1.0))
        return found


class Correction:
    """Correction of survivals, learnt from verified tokens, for two kinds of drafts: those of requests for which
    the model was asked (row 1 of what is here) and those of prompt lookup alone (row 0).

    A survival is corrected by its size, because lookups are surer of middling drafts than they should be, and right
    about good ones. A larger survival is never corrected to a smaller one, so prefixes stay prefixes.
    A token counts only where it was verified. Whether it was, was decided before it was drawn, so leaving the others
    out does not shift the ratio; counting an early rejection for the positions behind it would.
    """

    BINS = 10
    """Bins of survivals, each with a factor: observed over predicted."""
    BOUNDS = (0.5, 1.25)  # above 1: confidences that are too low are put right as well
    PRIOR = 64.0
    """Verified tokens' worth of belief in the calibration, of each bin."""
    WINDOW = 4096.0
    """Verified tokens per bin after which old ones have faded."""
    FADE = 0.9
    """Weight of the past after a probe that verified nothing: it looks whether things have changed."""

    def __init__(self) -> None:
        middles = (np.arange(self.BINS) + 0.5) / self.BINS
        self._knots = np.concatenate([[0.0], middles, [1.0]])
        self._bins = np.append(np.arange(self.BINS), self.BINS - 1)  # of every knot but the first
        self._values = np.tile(self._knots, (2, 1))  # what the knots are corrected to, never falling
        self._draw_lines()
        self._sums = np.zeros((3, 2 * self.BINS))  # survival predicted, observed, tokens
        self._turn = 0
        self._waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self._waiting_requests = 0

    def apply(self, survival: np.ndarray, by_model: bool) -> np.ndarray:
        """survival [..., gamma] of one kind of drafts, corrected; float32."""
        line = (survival * np.float32(2 * self.BINS)).astype(np.int32)
        result: np.ndarray = self._slopes[int(by_model)].take(line)
        result *= survival
        result += self._heights[int(by_model)].take(line)
        return result

    def least(self, worth: float | np.ndarray, by_model: bool) -> np.ndarray:
        """The least survivals that are corrected to at least `worth` > 0; inf: none is."""
        values = self._values[int(by_model)]
        # values[after - 1] < worth <= values[after]
        after = np.minimum(np.searchsorted(values, worth), len(values) - 1)
        low, high = values[after - 1], values[after]
        share = (worth - low) / np.maximum(high - low, 1e-12)
        found = self._knots[after - 1] + share * (self._knots[after] - self._knots[after - 1])
        return np.where(worth > values[-1], np.inf, found)

    def observe(
        self,
        survival: np.ndarray,
        verify_lens: np.ndarray,
        accept_lens: np.ndarray,
        draft_mask: np.ndarray,
        *,
        fade: bool = False,
    ) -> None:
        """Take in survival [R, gamma], verify_lens [R], accept_lens [R] in 1..gamma+1 and draft_mask [R] bool of one
        step.

        Small steps are gathered, of large ones some are left out: numbers this small cost by the call.
        """
        if fade:
            self._sums *= self.FADE
        self._turn += 1
        if self._turn * ENOUGH < len(verify_lens):
            return
        self._turn = 0
        self._waiting.append((survival, verify_lens, accept_lens, draft_mask))
        self._waiting_requests += len(verify_lens)
        if self._waiting_requests >= ENOUGH:
            gathered = [np.concatenate(part) for part in zip(*self._waiting, strict=True)]
            self._waiting, self._waiting_requests = [], 0
            self._update(*gathered)

    def _update(
        self, survival: np.ndarray, verify_lens: np.ndarray, accept_lens: np.ndarray, draft_mask: np.ndarray
    ) -> None:
        requests, positions = np.nonzero(verify_lens[:, None] > np.arange(survival.shape[1]))
        predicted = survival[requests, positions]
        bins = np.minimum((predicted * self.BINS).astype(np.int64), self.BINS - 1) + self.BINS * draft_mask[requests]
        accepted = accept_lens[requests] - 1 > positions
        step = [np.bincount(bins, weights, 2 * self.BINS) for weights in (predicted, accepted, None)]
        self._sums *= np.maximum(1.0 - step[2] / self.WINDOW, 0.0)
        self._sums += step
        # The prior agrees with the prediction, at the mean survival of the bin.
        predicted, observed, tokens = self._sums
        prior = self.PRIOR * (predicted / np.maximum(tokens, 1.0)) + 1e-9
        factors = np.clip((observed + prior) / (predicted + prior), *self.BOUNDS).reshape(2, self.BINS)
        worth = np.minimum(self._knots[1:] * factors[:, self._bins], 1.0)
        # What is less sure is worth no more than what is surer, of which more was verified.
        self._values[:, 1:] = np.minimum.accumulate(worth[:, ::-1], axis=1)[:, ::-1]
        self._draw_lines()

    def _draw_lines(self) -> None:
        """Slope and height of the line between knots for every half bin, and for 1: twice as fast as a search."""
        between = np.minimum((np.arange(2 * self.BINS + 1) + 1) // 2, self.BINS)
        slopes = np.diff(self._values, axis=1) / np.diff(self._knots)
        heights = self._values[:, :-1] - slopes * self._knots[:-1]
        self._slopes, self._heights = slopes[:, between].astype(np.float32), heights[:, between].astype(np.float32)
