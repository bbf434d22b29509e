"""Fits of a calibration: all positions by maximum likelihood, every class apart."""

from dataclasses import replace

import numpy as np

from .classes import CLASSES
from .model import Calibration, logit, quality, sigmoid
from .records import Records
from .table import CalibrationTable

PRIOR = 64.0
"""Weight of the prior that confidences are right, as a Gaussian on slope and shift of log odds. Drafts of one answer
are alike, so they tell less than their number suggests."""


def fit_table(fitted_on: Records, held_out: Records, *, dataset: str, verification: str = "token") -> CalibrationTable:
    """Each class's calibration by `fit_joint`, fitted on its records of `fitted_on` and judged on `held_out`."""

    def best(place: int) -> Calibration:
        fitted, judge = (part.select(part.classes == place) for part in (fitted_on, held_out))
        return unless_worse(fit_joint(fitted, held_out=judge), judge)

    return CalibrationTable(tuple(map(best, range(len(CLASSES)))), dataset, verification)


def unless_worse(calibration: Calibration, held_out: Records) -> Calibration:
    """`calibration` if it lowers the mean calibration error of the records held out, else raw confidences."""
    if sum(calibration.ece_after) < sum(calibration.ece_before):
        return calibration
    return replace(
        _reported(Calibration.identity(calibration.gamma), held_out, held_out), num_samples=calibration.num_samples
    )


def fit_joint(records: Records, *, held_out: Records | None = None) -> Calibration:
    """Temperatures and shifts of all positions by maximum likelihood of accepted lengths, censored at `verify_lens`.

    held_out: records that the error is reported on; None: `records`.

    A block that verified l tokens and accepted n has likelihood c'_1 ... c'_n, times (1 - c'_{n+1}) if n < l. Its log
    is a sum over the tested positions, so the joint maximum is that of gamma concave problems in (1/T, b), solved
    together by damped Newton steps.
    """
    logits, tested, survived = logit(records.confidence), records.tested, records.survived
    slope, shift = np.ones(records.gamma), np.zeros(records.gamma)
    loss = _loss(logits, tested, survived, slope, shift)
    for _ in range(100):
        predicted = sigmoid(logits * slope + shift)
        error, weight = (predicted - survived) * tested, predicted * (1 - predicted) * tested
        gradient = np.stack([(error * logits).sum(0) + PRIOR * (slope - 1), error.sum(0) + PRIOR * shift], -1)
        cross = (weight * logits).sum(0)
        hessian = np.stack(
            [np.stack([(weight * logits**2).sum(0) + PRIOR, cross], -1), np.stack([cross, weight.sum(0) + PRIOR], -1)],
            -2,
        )
        step = np.linalg.solve(hessian, gradient[..., None])[..., 0]
        scale = np.ones(records.gamma)
        for _ in range(30):  # halve the step of every position where it went too far
            new_slope = np.maximum(slope - scale * step[:, 0], 1e-3)
            new_shift = shift - scale * step[:, 1]
            new_loss = _loss(logits, tested, survived, new_slope, new_shift)
            worse = new_loss > loss
            if not worse.any():
                break
            scale = np.where(worse, scale / 2, scale)
        slope, shift = np.where(worse, slope, new_slope), np.where(worse, shift, new_shift)
        loss = np.where(worse, loss, new_loss)
        if np.abs(step * scale[:, None]).max() < 1e-9:
            break
    calibration = Calibration(tuple((1 / slope).tolist()), tuple(shift.tolist()), method="joint")
    return _reported(calibration, records, held_out)


def _loss(
    logits: np.ndarray, tested: np.ndarray, survived: np.ndarray, slope: np.ndarray, shift: np.ndarray
) -> np.ndarray:
    """[gamma] negative log-likelihood and prior of each position."""
    x = logits * slope + shift
    likelihood = ((np.logaddexp(0, x) - x * survived) * tested).sum(0)
    return likelihood + PRIOR / 2 * ((slope - 1) ** 2 + shift**2)


def _reported(calibration: Calibration, fitted_on: Records, held_out: Records | None) -> Calibration:
    """`calibration` with its quality."""
    judged = fitted_on if held_out is None else held_out
    samples, after, by_chance = quality(judged, calibration)
    reported = replace(calibration, num_samples=len(fitted_on), samples=samples)
    return replace(reported, ece_before=quality(judged).ece, ece_after=after, ece_by_chance=by_chance)
