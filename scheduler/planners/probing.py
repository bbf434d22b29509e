"""Probes: steps that draft although not drafting wins, so that a change is noticed.

Every step without drafting saves a share of its time, and a probe is paid from the savings. So probes cost at most that
share, and come as often as it allows: every few steps if drafting is cheap, after hundreds if it is expensive. A probe
that changes nothing halves the share, down to a bound; one that does restores it.
"""

from __future__ import annotations

SHARE = 0.01
"""Largest share of the time of steps without model drafts that goes to probing the model."""
LOOK_SHARE = 0.005
"""Largest share of the time of steps without lookups that goes to probing lookups."""
LEAST = 0.5
"""Smallest part of the share, after probes that changed nothing."""


class Probing:
    """Bounded by construction: nothing is spent that was not saved, and at most one probe is saved up."""

    def __init__(self, share: float = SHARE) -> None:
        self.share = share
        self._part = 1.0  # of the share
        self._saved = 0.0
        self._loss = 0.0

    @property
    def ready(self) -> bool:
        """True if `due` would be true now, called with the same loss."""
        return 0 < self._loss <= self._saved

    def due(self, loss: float, seconds: float) -> bool:
        """True if the next step should probe. Call it, or `save`, for each step for which not drafting wins.

        loss: seconds by which a probe is longer than the step without it. seconds: that step's.
        """
        self._loss = max(loss, 0.0)
        if self._saved >= self._loss:
            self._saved -= self._loss
            self._part = max(self._part / 2, LEAST)
            return True
        self.save(seconds)
        return False

    def save(self, seconds: float) -> None:
        """Save a share of a step of `seconds` that did not draft."""
        self._saved = min(self._saved + self._part * self.share * seconds, self._loss)

    def reset_backoff(self) -> None:
        """Restore the share: drafting wins again."""
        self._part = 1.0
