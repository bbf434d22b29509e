"""Rests: steps that neither draft nor look up, so that they cost what they would without speculation."""

from __future__ import annotations

import numpy as np

from .base import StepView

STILL_THERE = 0.75
"""A rest ends when fewer than this share of its requests are left."""


class Resting:
    """The current rest and its requests, if there is one."""

    def __init__(self) -> None:
        self._last: StepView | None = None  # None: no rest
        self._names = np.zeros(0, dtype=np.int64)  # of the requests that the rest began with

    @property
    def on(self) -> bool:
        return self._last is not None

    def begin(self, step: StepView) -> None:
        self._last, self._names = step, _names(step)

    def end(self) -> None:
        self._last = None

    def extend(self, step: StepView) -> None:
        """Rest in `step` as well, for which `holds` was true."""
        self._last = step

    def holds(self, step: StepView) -> bool:
        """True if the rest may go on: enough of its requests are left, and none has a service level."""
        if self._last is None or np.count_nonzero(step.levels):
            return False
        if same_requests(step, self._last):
            return True
        there = np.count_nonzero(np.isin(_names(step), self._names))
        return bool(there >= STILL_THERE * max(len(self._names), len(step.rows)))


def same_requests(one: StepView, other: StepView) -> bool:
    """True if two steps have the same requests, in the same order."""
    return _same(one.rows, other.rows) and _same(one.generations, other.generations)


def _same(ours: np.ndarray, others: np.ndarray) -> bool:
    return ours is others or np.array_equal(ours, others)


def _names(step: StepView) -> np.ndarray:
    """[R] int64, unique for every request that a row has had."""
    return step.generations << 32 | step.rows
