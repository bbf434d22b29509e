"""Calibrated confidences: temperatures per position, and how good they are.

A confidence c_k = P(x_k is accepted | x_1 ... x_{k-1} are) becomes c'_k = sigmoid(logit(c_k) / T_k + b_k). The planner
needs the size of the products of c', not only their order (DSpark, section 3.2.1). `fit.py` finds T and b.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from outrider.kernels.drafts import BELOW_ONE

from .records import Records


@dataclass(frozen=True, slots=True)
class Calibration:
    """temperatures: one per position, above 0. shifts: one per position; empty: all 0.

    The other fields describe the fit, the tuples by position: `samples`, records that verified it; `ece_before` and
    `ece_after`, errors of prefix survival, 0 without records; `ece_by_chance`, the mean `ece_after` that as many
    records give even if every calibrated survival is right.
    """

    temperatures: tuple[float, ...]
    shifts: tuple[float, ...] = ()
    method: str = "none"
    num_samples: int = 0
    samples: tuple[int, ...] = ()
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()
    ece_by_chance: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.temperatures or not all(0 < t < math.inf for t in self.temperatures):
            raise ValueError(f"a calibration needs temperatures above 0, one per position, not {self.temperatures}")
        if not self.shifts:
            object.__setattr__(self, "shifts", (0.0,) * len(self.temperatures))
        if len(self.shifts) != self.gamma or not all(map(math.isfinite, self.shifts)):
            raise ValueError(f"for {self.gamma} temperatures expected {self.gamma} finite shifts, not {self.shifts}")

    @classmethod
    def identity(cls, gamma: int) -> Calibration:
        """Raw confidences."""
        return cls((1.0,) * gamma)

    def of_length(self, gamma: int) -> Calibration:
        """The calibration for drafts of `gamma` tokens: it is cut, or its last position repeated."""
        places = np.minimum(np.arange(gamma), self.gamma - 1)
        temperatures, shifts = (np.array(each)[places].tolist() for each in (self.temperatures, self.shifts))
        return Calibration(tuple(temperatures), tuple(shifts))

    @property
    def gamma(self) -> int:
        return len(self.temperatures)

    @property
    def is_identity(self) -> bool:
        return set(self.temperatures) == {1.0} and set(self.shifts) == {0.0}

    def apply(self, confidence: np.ndarray) -> np.ndarray:
        """[N, gamma] float64 calibrated."""
        return sigmoid(logit(confidence) / np.array(self.temperatures) + np.array(self.shifts))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Calibration:
        fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in data.items()}
        return cls(**fields)


def logit(confidence: np.ndarray) -> np.ndarray:
    """float64 log odds; confidences of 0 and 1 become finite."""
    clipped = np.clip(np.nan_to_num(confidence.astype(np.float64)), 1e-7, BELOW_ONE)
    return np.log(clipped) - np.log1p(-clipped)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


class Quality(NamedTuple):
    """The fields of `Calibration` by position; `ece` is before or after."""

    samples: tuple[int, ...]
    ece: tuple[float, ...]
    ece_by_chance: tuple[float, ...]


def quality(records: Records, calibration: Calibration | None = None) -> Quality:
    """Quality of (calibrated) confidences on `records`: ECE of prefix survival in 15 equal-width bins."""
    calibration = calibration or Calibration.identity(records.gamma)
    survival = calibration.apply(records.confidence).cumprod(1)
    verified, survived = records.verified, records.survived
    positions = range(records.gamma)
    return Quality(
        samples=tuple(int(n) for n in verified.sum(0)),
        ece=tuple(ece(survival[verified[:, k], k], survived[verified[:, k], k]) for k in positions),
        ece_by_chance=tuple(ece_by_chance(survival[verified[:, k], k]) for k in positions),
    )


def ece(predicted: np.ndarray, outcome: np.ndarray) -> float:
    """Expected calibration error (Naeini et al., 2015) of predictions [N] for outcomes [N]; 0 for N = 0.

    The mean over equal-width bins, weighted by their size, of |mean prediction - mean outcome|.
    """
    return float(np.abs(np.bincount(_bins(predicted), predicted - outcome)).sum() / max(len(predicted), 1))


def ece_by_chance(predicted: np.ndarray) -> float:
    """The ECE that predictions [N] have on average if every one is right; 0 for N = 0.

    A bin's count then has variance sum p (1 - p), and the mean of |normal| is sqrt(2 / pi) of its deviation.
    """
    variance = np.bincount(_bins(predicted), predicted * (1 - predicted))
    return float(np.sqrt(2 / np.pi * variance).sum() / max(len(predicted), 1))


def _bins(predicted: np.ndarray) -> np.ndarray:
    """[N] the bin of each prediction, of 15 of equal width."""
    return np.minimum((predicted * 15).astype(np.int64), 14)
