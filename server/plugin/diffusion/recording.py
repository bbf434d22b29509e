"""Records of rounds for `outrider tune`: their times, and the states that base decoding passed through."""

from collections import deque
from typing import Any

import numpy as np

from outrider.profiles.draft_graphs import TEMPERATURES
from outrider.scheduler.spiffy.calibration import NodeCounts, Trajectory
from outrider.scheduler.spiffy.fill import Candidates

RECORDED_ROUNDS = 4096
RANKS = 8
"""Tokens of a position that a calibrated graph may use."""


class RoundRecording:
    """rounds: open blocks, rows and seconds of the last rounds without prompts.
    counts: of replayed requests, by whether they are sampled."""

    def __init__(self, mask_id: int) -> None:
        self._mask_id = mask_id
        self.rounds: deque[tuple[int, int, float]] = deque(maxlen=RECORDED_ROUNDS)
        self.counts = {False: NodeCounts(), True: NodeCounts()}

    def observe(self, req: Any, sampled: bool, before: np.ndarray, after: np.ndarray) -> None:
        """Record a step of a replayed request's open block, [B] int64 before and after it. If the block is still open,
        the request's `outrider_prediction` holds the forward's predictions."""
        path = getattr(req, "outrider_path", [])
        if path and not np.array_equal(path[-1].state, before):  # another block, or one that was started again
            path = []
        if (after == self._mask_id).any():
            req.outrider_path = [*path, req.outrider_prediction]
        elif path:
            states = np.stack([*(known.state for known in path), after])
            tokens = np.stack([known.tokens for known in path])
            candidates = Candidates(tokens, np.stack([known.probabilities for known in path]))
            self.counts[sampled].add(Trajectory(states, candidates), self._mask_id)

    def to_json(self) -> dict[str, Any]:
        """Return the recording for another process: `rounds`, and `counts` by class."""
        counts = {name: self.counts[name == "sampled"].to_json() for name in TEMPERATURES}
        return {"rounds": list(self.rounds), "counts": counts}
