"""Drift: how long served steps and drafts take, relative to the measured ones.

A profile is measured in a few minutes, and a shared machine does not slow all parts alike. Whether drafting pays
depends on the ratio of both factors.
"""

import math

RATE = 0.03
"""Weight of a step in running means."""


class Drift:
    """plain: observed over measured seconds of steps, without drafting. draft: of drafting, over `plain`."""

    def __init__(self) -> None:
        self.plain = self.draft = 1.0

    def observe(self, measured: float, seconds: float) -> None:
        """A step that was measured to take `measured` seconds without drafting took `seconds`."""
        self.plain = _moved(self.plain, seconds / (measured * self.plain))

    def observe_draft(self, measured: float, seconds: float, share: float = 1.0) -> None:
        """A draft that was measured to take `measured` seconds took `seconds`. share: the draft's part of the step's
        time, where `seconds` is the rest of a step and so has the whole step's noise; else 1."""
        ratio = max(seconds / (measured * self.plain * self.draft), 1e-3)
        # A draft may have become many times cheaper than a stale profile says.
        self.draft = _moved(self.draft, ratio, share, least=1e-3)


def _moved(factor: float, ratio: float, weight: float = 1.0, least: float = 0.05) -> float:
    """The factor after a step that took `ratio` times as long as predicted; from `least` to 4.

    A step counts as at most e^0.2 times longer or shorter, so that single hiccups change little.
    """
    surprise = min(max(math.log(ratio), -0.2), 0.2)
    return min(max(factor * math.exp(RATE * weight * surprise), least), 4.0)


def running_mean(mean: float, seconds: float) -> float:
    """The mean seconds of work that now took `seconds`, which count up to twice the mean. A mean of 0 is unknown."""
    return mean + RATE * (min(seconds, 2 * mean) - mean) if mean else seconds
