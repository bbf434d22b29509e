"""Learned from served rounds: how often drafts are accepted, and how long a round takes."""

import numpy as np

from ..cost.model import StepCost
from ..cost.prefill import PrefillCost

BINS, DEPTHS = 10, 4
WINDOW = 400.0
"""Drafts of one depth and score after which old ones have faded."""


class StateAcceptance:
    """Acceptance rates of drafts by score and by steps ahead."""

    def __init__(self) -> None:
        middles, depths = (np.arange(BINS) + 0.5) / BINS, np.arange(1, DEPTHS + 1)
        self._seen = np.full((DEPTHS, BINS), 4.0)  # at first a score counts as the chance of a step, seen in 4 drafts
        self._accepted = self._seen * middles ** depths[:, None]

    def chances(self, scores: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """Rates in 0..1 of drafts with `scores` that are `depths` steps ahead, counted from 1; all of one shape."""
        cells = _cells(scores, depths)
        return np.asarray(self._accepted[cells] / self._seen[cells])

    def observe(self, scores: np.ndarray, depths: np.ndarray, accepted: np.ndarray) -> None:
        """Take in outcomes of drafts; accepted: [n] bool."""
        cells = _cells(scores, depths)
        np.add.at(self._seen, cells, 1.0)
        np.add.at(self._accepted, cells, accepted.astype(float))
        fade = np.minimum(WINDOW / self._seen, 1.0)
        self._seen *= fade
        self._accepted *= fade


def _cells(scores: np.ndarray, depths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the counts; larger depths count as the largest."""
    return np.minimum(depths, DEPTHS) - 1, np.minimum((scores * BINS).astype(np.int64), BINS - 1)


class RoundCost:
    """Seconds of a round by its rows: measured and corrected by recent rounds; without a profile a line through recent
    rounds, as for the chunks of a prompt.

    measured: by the tokens of all rows. block_size: tokens of a row.
    """

    def __init__(self, measured: StepCost | None = None, block_size: int = 1) -> None:
        self.measured, self._line, self._block = measured, PrefillCost(), block_size

    @property
    def known(self) -> bool:
        """True if costs are known."""
        return self.measured is not None or self._line.known

    def observe(self, rows: int, seconds: float, open_blocks: int = 1, context: float = 0.0) -> None:
        """Learn that a round took `seconds`. context: tokens in the cache, summed over the requests."""
        if self.measured is not None:
            self.measured.observe(open_blocks, rows * self._block, context, 0, seconds)
        else:
            self._line.observe(rows * self._block, 0.0, seconds)

    def seconds(self, rows: np.ndarray, open_blocks: int = 1, context: float = 0.0) -> np.ndarray:
        """[n] seconds of rounds of `rows` [n], which may be means; they never fall with more rows, and are above 0."""
        tokens = rows * self._block
        if self.measured is None:
            return np.asarray(self._line.forward + (self._line.seconds(1, 0.0) - self._line.forward) * tokens)
        return np.maximum.accumulate(self.measured.seconds(open_blocks, np.rint(tokens).astype(np.int64), context))
