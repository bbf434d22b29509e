"""Drift: how long served steps and drafts take, relative to the measured ones.

A profile is measured in a few minutes, and a shared machine does not slow all parts alike. Whether drafting pays
depends on the ratio of both factors.
"""

import math

RATE = 0.03
"""Weight of a step in the running means."""
SURPRISE = 0.2
"""A step counts as at most this share longer or shorter than predicted, so that single hiccups change little."""
BOUNDS = 0.05, 4.0
"""Least and largest factor of steps."""
DRAFT_BOUNDS = 1e-3, 4.0
"""The same of drafts: a draft may have become many times cheaper than a stale profile says."""


class Drift:
    """plain: observed over measured seconds of steps, without drafting. draft: of drafting, over `plain`."""

    def __init__(self) -> None:
        self.plain = self.draft = 1.0

    def observe(self, measured: float, seconds: float) -> None:
        """A step that was measured to take `measured` seconds without drafting took `seconds`."""
        self.plain = _moved(self.plain, seconds / (measured * self.plain))

    def observe_draft(self, measured: float, seconds: float, share: float = 1.0) -> None:
        """A draft that was measured to take `measured` seconds took `seconds`. share: of the draft in the step's time,
        where `seconds` is the rest of a step and has all of its noise; else 1."""
        ratio = max(seconds / (measured * self.plain * self.draft), 1e-3)
        self.draft = _moved(self.draft, ratio, share, DRAFT_BOUNDS)


def _moved(factor: float, ratio: float, weight: float = 1.0, bounds: tuple[float, float] = BOUNDS) -> float:
    """The factor after a step that took `ratio` times as long as predicted."""
    surprise = min(max(math.log(ratio), -SURPRISE), SURPRISE)
    return min(max(factor * math.exp(RATE * weight * surprise), bounds[0]), bounds[1])


def running_mean(mean: float, seconds: float) -> float:
    """The mean time of the host's work, which now took `seconds`. A mean of 0 is unknown."""
    return mean + RATE * (min(seconds, 2 * mean) - mean) if mean else seconds
