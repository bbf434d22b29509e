"""Probes: now and then a step drafts although drafts do not pay, to notice a change; it verifies none of them."""

import numpy as np

SHARE = 0.01
"""Share of the time of steps without model drafts that goes to probes."""


def mostly_the_same(names: np.ndarray, planned: np.ndarray) -> bool:
    """True if three quarters of the requests are in both: `names` of the running ones, `planned` of the plan's."""
    needed = 0.75 * max(len(names), len(planned))
    if len(names) == len(planned) and np.count_nonzero(names == planned) >= needed:
        return True
    return len(set(names.tolist()) & set(planned.tolist())) >= needed


class Probing:
    """Every step without drafting saves SHARE of its time, and a probe is paid from the savings. So probes cost at
    most that share: they come every few steps if drafting is cheap, after hundreds of steps if it is expensive. A probe
    that was cheaper than expected gives the rest back, so that a price that is far too high is soon corrected."""

    def __init__(self) -> None:
        self._saved, self._loss = 0.0, 0.0

    @property
    def ready(self) -> bool:
        """True if `due` would be true now, with the same loss."""
        return 0 < self._loss <= self._saved

    def due(self, loss: float, seconds: float) -> bool:
        """True if the next step should probe. Call this or `save` for each step that is not to draft.

        loss: seconds by which a probe is longer than the step without it. seconds: that step's.
        """
        self._loss = max(loss, 0.0)
        if self._saved >= self._loss:
            self._saved -= self._loss
            return True
        self.save(seconds)
        return False

    def give_back(self, seconds: float) -> None:
        """A probe took `seconds` less than expected."""
        self._saved = min(self._saved + max(seconds, 0.0), self._loss)

    def save(self, seconds: float) -> None:
        """Save a share of a step of `seconds` that did not draft."""
        self._saved = min(self._saved + SHARE * seconds, self._loss)
