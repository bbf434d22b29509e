"""When nothing is drafted or looked up at all, so that a step costs what it would without speculation."""

from __future__ import annotations

import numpy as np

from outrider.scheduler.planners.base import StepView

STILL_THERE = 0.75
"""Share of the requests for which it was decided to rest; with fewer of them it is decided anew."""


class Resting:
    """Since when it rests, and for whom."""

    def __init__(self) -> None:
        self._last: StepView | None = None  # None: it does not rest
        self._names = np.zeros(0, dtype=np.int64)  # requests for which that was decided

    @property
    def on(self) -> bool:
        return self._last is not None

    def begin(self, step: StepView) -> None:
        self._last, self._names = step, _names(step)

    def end(self) -> None:
        self._last = None

    def go_on(self, step: StepView) -> None:
        """It rests in `step` as well, for which `holds` was true."""
        self._last = step

    def holds(self, step: StepView) -> bool:
        """Whether it may go on: enough of the requests are there still, and nobody asks for a service level."""
        if self._last is None or np.count_nonzero(step.levels):
            return False
        if same_requests(step, self._last):
            return True
        there = np.count_nonzero(np.isin(_names(step), self._names))
        return bool(there >= STILL_THERE * max(len(self._names), len(step.rows)))


def same_requests(one: StepView, other: StepView) -> bool:
    """Whether two steps have the same requests, in the same order."""
    return _same(one.rows, other.rows) and _same(one.generations, other.generations)


def _same(ours: np.ndarray, others: np.ndarray) -> bool:
    return ours is others or np.array_equal(ours, others)


def _names(step: StepView) -> np.ndarray:
    """[R] int64, one for each request that a row ever had."""
    return step.generations << 32 | step.rows
