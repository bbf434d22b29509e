"""A calibration that learns while serving.

Drafters without a trained confidence head have confidences that order tokens well, but acceptance depends on drafter,
text and temperature; that of lookups in other texts depends on how often texts repeat. For each class and position,
slope and shift of the log odds follow the outcomes by Newton steps of their likelihood, and old outcomes fade (logistic
regression by an extended Kalman filter). Earlier steps alone correct a step's confidences.
"""

from collections.abc import Collection

import numpy as np
import torch

from .classes import CLASSES, SOURCES
from .fit import PRIOR
from .model import Calibration, logit, sigmoid
from .records import Recorder
from .table import CalibrationTable

GATHERED = 64
"""Drafts that are learned from at once."""


class OnlineCalibration:
    """Slopes and shifts [classes, gamma] of log odds, at first those of `start`; outcomes change those of `sources`."""

    def __init__(self, gamma: int, start: CalibrationTable | None = None, sources: Collection[str] = ("model",)):
        shape = len(CLASSES), gamma
        self.slopes, self.shifts = np.ones(shape), np.zeros(shape)
        if start is not None:
            inverse, shifts = start.parameters(gamma, torch.device("cpu"))
            self.slopes, self.shifts = inverse.double().numpy().copy(), shifts.double().numpy().copy()
        self._information = np.broadcast_to(np.array([PRIOR, 0.0, PRIOR])[:, None, None], (3, *shape)).copy()
        self._recent = Recorder(GATHERED, gamma)
        self._learned = np.array([SOURCES[case % len(SOURCES)] in sources for case in range(len(CLASSES))])

    def observe(
        self, confidence: np.ndarray, verify_lens: np.ndarray, accepted: np.ndarray, classes: np.ndarray
    ) -> CalibrationTable | None:
        """Take in R drafts: confidence [R, gamma] raw, verify_lens, accepted (draft tokens) and classes [R].

        Returns the calibration from now on; None: as it was.
        """
        learned, taught = False, np.flatnonzero(self._learned[classes])
        for start in range(0, len(taught), GATHERED):
            part = taught[start : start + GATHERED]
            if len(part) + len(self._recent) > GATHERED:
                learned = self._learn()
            self._recent.record(confidence[part], verify_lens[part], accepted[part], classes[part])
        if len(self._recent) == GATHERED:
            learned = self._learn()
        return self.table() if learned else None

    def table(self) -> CalibrationTable:
        """The corrections known so far."""
        both = zip((1 / self.slopes).tolist(), self.shifts.tolist(), strict=True)
        return CalibrationTable(tuple(Calibration(tuple(t), tuple(b), method="online") for t, b in both))

    def _learn(self) -> bool:
        """One Newton step on the gathered drafts; returns True."""
        records = self._recent.records()
        self._recent.clear()
        tested, shape = records.tested, self.slopes.shape
        cells = (records.classes[:, None] * shape[1] + np.arange(shape[1]))[tested]
        x, y = logit(records.confidence)[tested], records.survived[tested]
        predicted = sigmoid(x * self.slopes.ravel()[cells] + self.shifts.ravel()[cells])
        weight, error = predicted * (1 - predicted), y - predicted

        def total(values: np.ndarray) -> np.ndarray:
            return np.bincount(cells, values, minlength=self.slopes.size).reshape(shape)

        fade = np.exp(-total(np.ones_like(x)) / 4096)  # old outcomes have faded to 1 / e after 4,096 of their cell
        self._information *= fade
        self._information[[0, 2]] += (1 - fade) * PRIOR
        self._information += [total(weight * x * x), total(weight * x), total(weight)]
        slope, cross, shift = self._information
        on_slope, on_shift = total(error * x), total(error)
        determinant = slope * shift - cross * cross
        # Above 0, so that surer tokens stay the surer ones.
        slopes = np.clip(self.slopes + (shift * on_slope - cross * on_shift) / determinant, 0.05, 4.0)
        self.shifts = self.shifts + (on_shift - cross * (slopes - self.slopes)) / shift  # the best for that slope
        self.slopes = slopes
        return True
