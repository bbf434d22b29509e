"""When to draft although not drafting wins, so that a change is noticed.

Every step without drafting puts a share of its time aside; a probe is paid from that. Probes therefore cost at most
that share of the time, and come as often as it allows: after two steps where drafting is cheap, after hundreds where it
is dear. Half of the purse is kept for requests that join, because they are what changes most.
"""

from __future__ import annotations

SHARE = 0.01
"""Of the time of steps without drafting, at most this much goes to probes."""
PURSE = 2.0
"""Probes that may be saved up."""


class Probing:
    """Bounded by construction: nothing is spent that was not saved, and no more than PURSE probes are saved up."""

    def __init__(self) -> None:
        self._saved = 0.0
        self._most = 0.0

    def due(self, loss: float, seconds: float, joined: bool) -> bool:
        """Whether the next step should probe; called, or `save`, for each step for which not drafting wins.

        loss: seconds by which a probe is longer than the step without drafting. seconds: that step's.
        joined: requests have come since the last probe.
        """
        loss = max(loss, 0.0)
        if self._saved >= (loss if joined else PURSE * loss):
            self._saved -= loss
            return True
        self._most = PURSE * loss
        self.save(seconds)
        return False

    def save(self, seconds: float) -> None:
        """A step of `seconds` does not draft."""
        self._saved = min(self._saved + SHARE * seconds, self._most)
