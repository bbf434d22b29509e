"""The planner's memory of drafts: each request's last survivals, and how many tokens were accepted for each predicted.

Arrays have one entry per row of the engine's request pool: they grow to the largest row seen, not with uptime.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .cost.drift import RATE
from .curve import LARGEST

DEPTH = 16
"""Drafts that are kept of each request; a power of two."""
SAMPLES = 64
"""Drafts that are kept of a group (of all its requests together); also the most groups that are kept."""


class SurvivalHistory:
    """The last DEPTH survivals [gamma] of every request, and the last SAMPLES of every group of requests; with each the
    chance that the model had to draft for it: 1, or less where prompt lookup gave the draft.

    prior: confidence that is assumed before anything was written; high, so that drafting is tried.
    """

    def __init__(self, gamma: int, *, prior: float = 0.8):
        self._start = np.append(prior ** np.arange(1, gamma + 1), 1.0).astype(np.float32)
        self._records = np.zeros((64 * DEPTH, gamma + 1), dtype=np.float32)  # row by row
        self._generations = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.int64)  # drafts written for the row's request
        self._pools: dict[int, _Pool] = {}  # the least recently used first

    def write(
        self,
        rows: np.ndarray,
        generations: np.ndarray,
        survival: np.ndarray,
        drafted: np.ndarray | float = 1.0,
        groups: np.ndarray | None = None,
    ) -> None:
        """Append survival [R, gamma] of a step. drafted: [R] chances as above. groups: as in `StepView`."""
        records = np.empty((len(rows), survival.shape[1] + 1), dtype=np.float32)
        records[:, :-1], records[:, -1] = survival, drafted
        counts = self.counts(rows, generations)
        self._records[rows * DEPTH + counts % DEPTH] = records
        self._counts[rows], self._generations[rows] = counts + 1, generations
        for pool, members in self._pools_of(groups):
            pool.write(records[members])

    def read(
        self, rows: np.ndarray, generations: np.ndarray, samples: int, groups: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Each request's latest survivals, newest first: [n, R, gamma] float32, a copy. [n, R] chances that the model
        had to draft.

        n is `samples`, at most DEPTH, and half as many of the group: the next passage of a text resembles the mean of
        all texts more than its own last passage, and a plan by this alone would rest after every hard passage.
        A request with fewer drafts repeats them; one without drafts gets the mean of its group.
        """
        counts, depth = self.counts(rows, generations), min(samples, DEPTH)
        back = np.arange(depth)[:, None] % np.clip(counts, 1, DEPTH)
        records = np.empty((depth + depth // 2, len(rows), self._records.shape[1]), dtype=np.float32)
        records[:depth] = self._records.take(rows * DEPTH + (counts - 1 - back) % DEPTH, axis=0)
        if depth > 1 or not counts.all():
            for pool, members in self._pools_of(groups):
                places = np.arange(len(rows))[members]
                records[depth:, places] = pool.spread(depth // 2, len(places))
                if len(unknown := places[counts[places] == 0]):
                    records[:depth, unknown] = pool.mean
        return records[:, :, :-1], records[:, :, -1]

    def extrapolated(self, survival: np.ndarray, depth: int, block: int) -> np.ndarray:
        """survival [n, gamma] of drafts of `depth` tokens, continued up to `block` tokens: it falls as that of the mean
        draft of the latest group."""
        result = survival.copy()
        mean = self._pools[next(reversed(self._pools))].mean if self._pools else self._start
        share = np.minimum(mean[depth:block] / max(float(mean[depth - 1]), 1e-6), 1.0)
        unseen = result[:, depth:block]
        unseen[:] = np.where(unseen > 0, unseen, survival[:, depth - 1 : depth] * share)
        return result

    def _pools_of(self, groups: np.ndarray | None) -> Iterator[tuple[_Pool, Any]]:
        """The pool of each group, with the places of its requests in the batch."""
        for group in (0,) if groups is None else np.unique(groups).tolist():
            self._pools[group] = pool = self._pools.pop(group, None) or _Pool(self._start)
            if len(self._pools) > SAMPLES:
                del self._pools[next(iter(self._pools))]
            yield pool, slice(None) if groups is None else np.flatnonzero(groups == group)

    def counts(self, rows: np.ndarray, generations: np.ndarray) -> np.ndarray:
        """[R] drafts written for each request; room is made for new rows."""
        if len(rows) and (missing := int(rows.max()) + 1 - len(self._counts)) > 0:
            missing = max(missing, len(self._counts))
            self._records = np.pad(self._records, ((0, missing * DEPTH), (0, 0)))
            self._generations, self._counts = (np.pad(a, (0, missing)) for a in (self._generations, self._counts))
        return self._counts[rows] * (self._generations[rows] == generations)


class _Pool:
    """The last SAMPLES records [gamma + 1] of a group, survivals and chance. start: record of an unknown request."""

    def __init__(self, start: np.ndarray):
        self._records = np.tile(start, (SAMPLES, 1))
        self._place = 0

    def write(self, records: np.ndarray) -> None:
        """Take in records [n, gamma + 1]; of more than SAMPLES every second, third, …"""
        new = records[:: max(-(-len(records) // SAMPLES), 1)]
        self._records[(self._place + np.arange(len(new))) % SAMPLES] = new
        self._place += len(new)

    @property
    def mean(self) -> np.ndarray:
        """[gamma + 1] mean record."""
        return np.asarray(self._records.mean(0))

    def spread(self, samples: int, requests: int) -> np.ndarray:
        """[samples, requests, gamma + 1] records, no two alike where there are enough."""
        count = samples * requests
        places = np.arange(count).reshape(samples, requests) * max(SAMPLES // max(count, 1), 1)
        return self._records[(self._place + places) % SAMPLES]


class Correction:
    """Accepted over predicted draft tokens of recent steps. Survivals are multiplied by this `factor`, so the planner
    notices within a few steps that drafts fail. It is as near to 1 as `SURE` standard deviations of the accepted number
    allow.

    Verified tokens alone count. That was decided before they were drawn, so leaving out the rest does not shift the
    ratio; counting an early rejection for later positions would.
    """

    SURE = 2.0
    WINDOW = 1024.0
    """Predicted tokens after which old ones have faded to 1 / e."""

    def __init__(self) -> None:
        self._predicted, self._accepted = 0.0, 0.0
        self.factor = 1.0

    def observe(self, survival: np.ndarray, verify_lens: np.ndarray, accept_lens: np.ndarray) -> None:
        """Learn from a step: survival [R, gamma], verify_lens [R], accept_lens [R] in 1..gamma+1."""
        predicted = float(survival[np.arange(survival.shape[1]) < verify_lens[:, None]].sum())
        fade = math.exp(-predicted / self.WINDOW)
        self._predicted = self._predicted * fade + predicted
        self._accepted = self._accepted * fade + float(np.minimum(accept_lens - 1, verify_lens).sum())
        self._update()

    def fade(self) -> None:
        """Forget a part of the past after a probe, which verifies no drafts: in time failed drafts are tried again."""
        self._predicted, self._accepted = (1 - RATE) * self._predicted, (1 - RATE) * self._accepted
        self._update()

    def _update(self) -> None:
        if self._predicted > 0:
            root = math.sqrt(self.SURE**2 + 4 * self._accepted)  # bounds of a Poisson mean
            least, most = ((root - self.SURE) / 2) ** 2, ((root + self.SURE) / 2) ** 2
            self.factor = min(min(max(self._predicted, least), most) / self._predicted, LARGEST)
