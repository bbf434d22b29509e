"""The calibration of an engine: one per class."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from outrider.kernels.upload import upload

from .classes import CLASSES
from .model import Calibration


@dataclass(frozen=True, slots=True, eq=False)  # hashed in every step
class CalibrationTable:
    """by_class: calibrations of one gamma, in the order of CLASSES.

    dataset: a name for people. verification: of the sampled class, "block" or "token".
    """

    by_class: tuple[Calibration, ...]
    dataset: str = ""
    verification: str = "token"

    def __post_init__(self) -> None:
        gammas = {calibration.gamma for calibration in self.by_class}
        if len(self.by_class) != len(CLASSES) or len(gammas) != 1:
            raise ValueError(f"a calibration for one gamma and each of {', '.join(CLASSES)} is needed")

    @classmethod
    def of(cls, by_name: Mapping[str, Calibration], gamma: int, **other: Any) -> Self:
        """Calibrations by class name; raw confidences in the other classes."""
        return cls(tuple(by_name.get(case, Calibration.identity(gamma)) for case in CLASSES), **other)

    def first(self, positions: int) -> Self:
        """The calibration for drafts of at most `positions` tokens."""
        if positions >= self.gamma:
            return self
        return replace(self, by_class=tuple(each.of_length(positions) for each in self.by_class))

    @property
    def gamma(self) -> int:
        return self.by_class[0].gamma

    def parameters(self, positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """1 / T and b of c' = sigmoid(logit(c) / T + b): [classes, positions] float32 each, made once for a device.

        Lookups may be longer than the fitted drafts: further positions are like the last one.
        """
        if positions < self.gamma:
            raise ValueError(
                f"this calibration was fitted for gamma {self.gamma}, the drafter gives {positions}: "
                "run `outrider tune` with the gamma that is served"
            )
        return _parameters(self, positions, device)

    def to_json(self) -> dict[str, Any]:
        """The form kept in a profile."""
        classes = {case: calibration.to_json() for case, calibration in zip(CLASSES, self.by_class, strict=True)}
        return {"dataset": self.dataset, "verification": self.verification, "cases": classes}

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read `to_json` from a file; raises ValueError naming it."""
        try:
            data = json.loads(path.read_text())
            by_class = tuple(Calibration.from_json(data["cases"][case]) for case in CLASSES)
            return cls(by_class, data["dataset"], data["verification"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no calibration ({error!r}); measure anew: outrider tune") from None


def parameters_of_each(
    tables: Sequence[CalibrationTable], confidence: torch.Tensor, classes: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Each request's place [R] in the parameters of all calibrations of a batch, and these parameters.

    tables: [R] calibrations of the requests. confidence: [R, gamma]. classes: [R] places in CLASSES.
    """
    places: dict[CalibrationTable, int] = {}
    each = [places.setdefault(table, len(places)) for table in tables]
    if len(places) == 1:
        return classes, tables[0].parameters(confidence.shape[1], confidence.device)
    below = upload(np.array(each, dtype=np.int64) * len(CLASSES), classes.device)
    return classes + below, _stacked(tuple(places), confidence.shape[1], confidence.device)


@lru_cache(maxsize=16)
def _stacked(
    tables: tuple[CalibrationTable, ...], positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The parameters of several calibrations, one below the other."""
    inverse, shifts = zip(*(table.parameters(positions, device) for table in tables), strict=True)
    return torch.cat(inverse), torch.cat(shifts)


@lru_cache(maxsize=8)
def _parameters(table: CalibrationTable, positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    by_class = [calibration.of_length(positions) for calibration in table.by_class]
    inverse = 1.0 / torch.tensor([calibration.temperatures for calibration in by_class], dtype=torch.float64)
    shifts = torch.tensor([calibration.shifts for calibration in by_class], dtype=torch.float32)
    return inverse.float().to(device), shifts.to(device)
