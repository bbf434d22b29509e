"""Drift: recent steps of an engine, relative to the measured ones.

Three factors, learnt from the steps that are served: a machine that others share does not slow all parts alike, and a
profile is measured in minutes that may have been better or worse than usual. Whether a step with drafts or one without
is cheaper depends on their ratio.

The first two, of a step's plain part P and of what further tokens add V, are the state of a Kalman filter: it walks,
mostly both factors together, and a step of s seconds shows plain P + tokens V = s. Steps of one shape alone leave the
ratio at what the profile says.
"""

from __future__ import annotations

import math

BOUNDS = (0.4, 4.0)
"""Bounds of each factor."""
SURPRISE = 0.2
"""A step counts as at most this share longer or shorter than predicted: a hiccup of 10x moves the factors a percent."""
NOISE = 0.2
"""Standard deviation of a step's time, as a share of it."""
TOGETHER, APART = 0.006, 0.003
"""Standard deviations of a step of the walk: of both factors together, and of each alone."""
UNSURE_TOGETHER, UNSURE_APART = 0.15, 0.06
"""The same at first, and at most."""
DRAFT_RATE = 0.03
"""Weight of one draft in the running average of observed / predicted time."""


class Drift:
    """plain, tokens: observed over measured time of a step without further tokens, and of what those add.
    draft: of drafting, over `plain`.
    """

    def __init__(self) -> None:
        self.plain = self.tokens = self.draft = 1.0
        # Covariance of plain and tokens.
        self._pp = self._tt = UNSURE_TOGETHER**2 + UNSURE_APART**2
        self._pt = UNSURE_TOGETHER**2

    def observe(self, plain: float, further: float, seconds: float) -> None:
        """A step that was measured to take `plain` and `further` seconds for further tokens, took `seconds`."""
        predicted = self.plain * plain + self.tokens * further
        hp, ht = plain / predicted, further / predicted
        surprise = min(max(seconds / predicted - 1.0, -SURPRISE), SURPRISE)
        p, t = self._pp * hp + self._pt * ht, self._pt * hp + self._tt * ht
        total = hp * p + ht * t + NOISE**2
        self.plain = _bounded(self.plain + p / total * surprise)
        self.tokens = _bounded(self.tokens + t / total * surprise)
        walk = TOGETHER**2
        most = UNSURE_TOGETHER**2 + UNSURE_APART**2
        self._pp = min(self._pp - p * p / total + walk + APART**2, most)
        self._tt = min(self._tt - t * t / total + walk + APART**2, most)
        self._pt = min(max(self._pt - p * t / total + walk, 0.0), math.sqrt(self._pp * self._tt))

    def observe_draft(self, measured: float, seconds: float) -> None:
        """A draft that was measured to take `measured` seconds took `seconds`."""
        surprise = math.log(seconds / (measured * self.plain * self.draft))
        self.draft = _bounded(self.draft * math.exp(DRAFT_RATE * min(max(surprise, -SURPRISE), SURPRISE)))


def _bounded(factor: float) -> float:
    return min(max(factor, BOUNDS[0]), BOUNDS[1])
