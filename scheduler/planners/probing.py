"""When to draft although not drafting wins, so that a change is noticed.

Every step without drafting puts a share of its time aside; a probe is paid from that. Probes therefore cost at most
that share of the time, and come as often as it allows: after two steps where drafting is cheap, after hundreds where it
is dear. Each that changes nothing halves the share, down to a bound, and one that does restores it. Half of the purse
is kept for requests that join, because they are what changes most.
"""

from __future__ import annotations

SHARE = 0.01
"""Of the time of steps without a model's drafts, at most this much goes to probes of those."""
LOOK_SHARE = 0.005
"""Of the time of steps in which nothing is looked up, to probes of that."""
LEAST = 0.5
"""Of the share, what is left of it however often probes change nothing."""
PURSE = 2.0
"""Probes that may be saved up."""


class Probing:
    """Bounded by construction: nothing is spent that was not saved, and no more than PURSE probes are saved up."""

    def __init__(self, share: float = SHARE) -> None:
        self.share = share
        self._part = 1.0  # of the share
        self._saved = 0.0
        self._most = 0.0

    @property
    def ready(self) -> bool:
        """Whether `due` would say so now, if it is called with the same loss."""
        return 0 < self._most <= self._saved

    def due(self, loss: float, seconds: float, joined: bool) -> bool:
        """Whether the next step should probe; called, or `save`, for each step for which not drafting wins.

        loss: seconds by which a probe is longer than the step without it. seconds: that step's.
        joined: requests have come since the last probe.
        """
        loss = max(loss, 0.0)
        self._most = PURSE * loss
        if self._saved >= (loss if joined else self._most):
            self._saved -= loss
            self._part = max(self._part / 2, LEAST)
            return True
        self.save(seconds)
        return False

    def save(self, seconds: float) -> None:
        """A step of `seconds` does not draft."""
        self._saved = min(self._saved + self._part * self.share * seconds, self._most)

    def paid(self) -> None:
        """What was looked for wins."""
        self._part = 1.0
