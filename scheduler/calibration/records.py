"""Records to fit calibration on, in bounded memory: raw confidences of drafts, and their accepted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Records:
    """N drafted blocks.

    confidence: [N, gamma] float32, raw (before calibration).
    verify_lens: [N] int64 in 0..gamma, draft tokens verified; later ones are censored.
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
        """[N, gamma] bool, positions verified after all earlier ones were accepted.

        A share c_k of these is accepted, also if blocks are verified as a whole: whether one keeps k tokens does not
        depend on how many are verified after k (docs/planner.md).
        """
        return np.arange(self.gamma) < np.minimum(self.verify_lens, self.accepted + 1)[:, None]

    @property
    def verified(self) -> np.ndarray:
        """[N, gamma] bool, positions at which the prefix survival was observed.

        Only `verify_lens` decides, never the outcome. Counting a block that was rejected early at positions that it did
        not verify would make them look worse than they are.
        """
        return np.arange(self.gamma) < self.verify_lens[:, None]

    @property
    def survived(self) -> np.ndarray:
        """[N, gamma] bool, positions that are accepted with all earlier ones."""
        return np.arange(self.gamma) < self.accepted[:, None]

    def select(self, which: np.ndarray) -> Records:
        """The records at a mask [N] or at indices [M]."""
        return Records(self.confidence[which], self.verify_lens[which], self.accepted[which], self.classes[which])

    @classmethod
    def concatenate(cls, parts: Sequence[Records]) -> Records:
        """All records of `parts`, at least one, of one gamma."""
        names = ("confidence", "verify_lens", "accepted", "classes")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


class Recorder:
    """Keeps the last `capacity` drafted blocks, of `total` since `clear`."""

    def __init__(self, capacity: int, gamma: int):
        if capacity < 1 or gamma < 0:
            raise ValueError(f"capacity is at least 1 and gamma at least 0, not {capacity} and {gamma}")
        self.capacity, self.total = capacity, 0
        self._confidence = np.zeros((capacity, gamma), dtype=np.float32)
        self._numbers = np.zeros((3, capacity), dtype=np.int64)

    def __len__(self) -> int:
        return min(self.total, self.capacity)

    def record(
        self, confidence: np.ndarray, verify_lens: np.ndarray, accepted: np.ndarray, classes: np.ndarray
    ) -> None:
        """Take in one step: confidence [R, gamma] raw, verify_lens, accepted (draft tokens) and classes [R]."""
        last = slice(-self.capacity, None)
        places = (self.total + np.arange(len(confidence)))[last] % self.capacity
        self._confidence[places] = confidence[last]
        for kept, numbers in zip(self._numbers, (verify_lens, accepted, classes), strict=True):
            kept[places] = numbers[last]
        self.total += len(confidence)

    def records(self) -> Records:
        """The records, oldest first."""
        places = np.arange(self.total - len(self), self.total) % self.capacity
        return Records(self._confidence[places], *self._numbers[:, places])

    def clear(self) -> None:
        """Forget everything."""
        self.total = 0
