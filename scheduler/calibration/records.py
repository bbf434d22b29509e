"""Records what calibration is fitted on, in bounded memory: raw confidences and what became of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Records:
    """N drafted blocks.

    confidence: [N, gamma] float32, raw (before calibration).
    verify_lens: [N] int64 in 0..gamma, draft tokens verified; what lies beyond was not observed (censored).
    accepted: [N] int64 in 0..verify_lens, draft tokens accepted.
    classes: [N] int64, place in `classes.CLASSES` of each block.
    """

    confidence: np.ndarray
    verify_lens: np.ndarray
    accepted: np.ndarray
    classes: np.ndarray

    def __post_init__(self) -> None:
        if self.confidence.ndim != 2:
            raise ValueError(f"confidence is [N, gamma], not {self.confidence.shape}")
        count, gamma = self.confidence.shape
        for name in ("verify_lens", "accepted", "classes"):
            if getattr(self, name).shape != (count,):
                raise ValueError(f"for {count} blocks {name} is [{count}], not {getattr(self, name).shape}")
        lens, accepted = self.verify_lens, self.accepted
        if not ((accepted >= 0) & (accepted <= lens) & (lens <= gamma)).all():
            raise ValueError(f"expected 0 <= accepted <= verify_lens <= {gamma} in every record")

    def __len__(self) -> int:
        return len(self.confidence)

    @property
    def gamma(self) -> int:
        return int(self.confidence.shape[1])

    @property
    def tested(self) -> np.ndarray:
        """[N, gamma] bool, positions verified with everything before them accepted.

        Of these, c_k of them are accepted, by block too: how many blocks keep at least k tokens does not depend on what
        is verified behind k (docs/planner.md).
        """
        return np.arange(self.gamma) < np.minimum(self.verify_lens, self.accepted + 1)[:, None]

    @property
    def verified(self) -> np.ndarray:
        """[N, gamma] bool, positions whose prefix survival was observed.

        Only `verify_lens` decides, never the outcome: a block that was rejected early but verified no further is left
        out of the later positions like one that was accepted, otherwise they would look worse than they are.
        """
        return np.arange(self.gamma) < self.verify_lens[:, None]

    @property
    def survived(self) -> np.ndarray:
        """[N, gamma] bool, positions accepted together with all before them."""
        return np.arange(self.gamma) < self.accepted[:, None]

    def select(self, which: np.ndarray) -> Records:
        """The records at a mask [N] or at indices [M]."""
        return Records(self.confidence[which], self.verify_lens[which], self.accepted[which], self.classes[which])

    @classmethod
    def concatenate(cls, parts: Sequence[Records]) -> Records:
        """All records of `parts`, at least one, of one gamma."""
        return cls(
            np.concatenate([part.confidence for part in parts]),
            np.concatenate([part.verify_lens for part in parts]),
            np.concatenate([part.accepted for part in parts]),
            np.concatenate([part.classes for part in parts]),
        )


GATHERED = 32
"""Steps that are written into a recorder's arrays at once."""


class Recorder:
    """Keeps the last `capacity` drafted blocks; with gamma 0, where nobody drafts, there are none."""

    def __init__(self, capacity: int, gamma: int):
        if capacity < 1 or gamma < 0:
            raise ValueError(f"capacity is at least 1 and gamma at least 0, not {capacity} and {gamma}")
        self.capacity = capacity
        self.total = 0  # blocks seen
        self._waiting: list[tuple[np.ndarray, ...]] = []
        self._confidence = np.zeros((capacity, gamma), dtype=np.float32)
        self._verify_lens = np.zeros(capacity, dtype=np.int64)
        self._accepted = np.zeros(capacity, dtype=np.int64)
        self._classes = np.zeros(capacity, dtype=np.int64)

    def __len__(self) -> int:
        return min(self.total, self.capacity)

    def record(
        self, confidence: np.ndarray, verify_lens: np.ndarray, accepted: np.ndarray, classes: np.ndarray
    ) -> None:
        """Take in one step: confidence [R, gamma] raw, verify_lens, accepted (draft tokens) and classes [R].

        The arrays are kept for a while: do not write to them afterwards.
        """
        self._waiting.append((confidence, verify_lens, accepted, classes))
        self.total += len(confidence)
        if len(self._waiting) >= GATHERED:
            self._write()

    def _write(self) -> None:
        """Into the arrays with the steps that wait; together, since numbers this small cost by the call."""
        if not self._waiting:
            return
        new = Records(*(np.concatenate(part) for part in zip(*self._waiting, strict=True)))
        self._waiting = []
        if len(new) > self.capacity:
            new = new.select(np.arange(len(new) - self.capacity, len(new)))
        place = (self.total - len(new) + np.arange(len(new))) % self.capacity
        self._confidence[place] = new.confidence
        self._verify_lens[place] = new.verify_lens
        self._accepted[place] = new.accepted
        self._classes[place] = new.classes

    def records(self) -> Records:
        """A copy of what is kept, oldest first."""
        self._write()
        order = np.arange(self.total - len(self), self.total) % self.capacity
        return Records(self._confidence[order], self._verify_lens[order], self._accepted[order], self._classes[order])

    def clear(self) -> None:
        """Forget everything."""
        self._waiting, self.total = [], 0
