"""Probes: steps that draft although not drafting wins, so that a change is noticed.

Every step without drafting saves a share of its time, and a probe is paid from the savings. So probes cost at most that
share, and come as often as it allows: every few steps if drafting is cheap, after hundreds if it is expensive. A probe
that changes nothing halves the share, down to a bound; one that does restores it. Half of the savings is kept for
requests that join, because they change most.
"""

from __future__ import annotations

SHARE = 0.01
"""Largest share of the time of steps without model drafts that goes to probing the model."""
LOOK_SHARE = 0.005
"""Largest share of the time of steps without lookups that goes to probing lookups."""
LEAST = 0.5
"""Smallest part of the share, after probes that changed nothing."""
MAX_SAVED_PROBES = 2.0
"""Most probes that may be saved up."""


class Probing:
    """Bounded by construction: nothing is spent that was not saved, and no more than MAX_SAVED_PROBES probes are saved
    up."""

    def __init__(self, share: float = SHARE) -> None:
        self.share = share
        self._part = 1.0  # of the share
        self._saved = 0.0
        self._most = 0.0

    @property
    def ready(self) -> bool:
        """True if `due` would be true now, called with the same loss."""
        return 0 < self._most <= self._saved

    def due(self, loss: float, seconds: float, joined: bool) -> bool:
        """True if the next step should probe. Call it, or `save`, for each step for which not drafting wins.

        loss: seconds by which a probe is longer than the step without it. seconds: that step's.
        joined: requests have come since the last probe.
        """
        loss = max(loss, 0.0)
        self._most = MAX_SAVED_PROBES * loss
        if self._saved >= (loss if joined else self._most):
            self._saved -= loss
            self._part = max(self._part / 2, LEAST)
            return True
        self.save(seconds)
        return False

    def save(self, seconds: float) -> None:
        """Save a share of a step of `seconds` that did not draft."""
        self._saved = min(self._saved + self._part * self.share * seconds, self._most)

    def reset_backoff(self) -> None:
        """Restore the share: drafting wins again."""
        self._part = 1.0
