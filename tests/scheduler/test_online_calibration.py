"""OnlineCalibration turns confidences into chances while serving."""

import numpy as np
import pytest
import torch

from outrider.scheduler.calibration.classes import CLASSES, SOURCES
from outrider.scheduler.calibration.fit import fit_joint
from outrider.scheduler.calibration.model import Calibration, logit, quality, sigmoid
from outrider.scheduler.calibration.online import OnlineCalibration
from outrider.scheduler.calibration.records import Records
from outrider.scheduler.calibration.table import CalibrationTable

GAMMA = 4
SLOPES, SHIFTS = np.array([0.8, 0.6, 0.5, 0.5]), np.array([-0.4, -0.2, 0.3, 0.0])
SAMPLED = CLASSES.index("sampled, model")


def drafts(count: int, seed: int, case: int = SAMPLED, slopes: np.ndarray = SLOPES) -> Records:
    """Raw confidences with these slopes and shifts, verified to random lengths."""
    draw = np.random.default_rng(seed)
    confidence = sigmoid(draw.normal(0.5, 2.0, (count, GAMMA))).astype(np.float32)
    kept = draw.random((count, GAMMA)) < sigmoid(logit(confidence) * slopes + SHIFTS)
    lens = draw.integers(0, GAMMA + 1, count)
    accepted = np.minimum(np.cumprod(kept, 1).sum(1), lens)
    return Records(confidence, lens, accepted, np.full(count, case))


def shown(to: OnlineCalibration, records: Records, step: int = 7) -> None:
    for start in range(0, len(records), step):
        part = records.select(np.arange(start, min(start + step, len(records))))
        to.observe(part.confidence, part.verify_lens, part.accepted, part.classes)


@pytest.mark.parametrize("step", [1, 7, 500])
def test_it_agrees_with_a_fit_of_all_records(step: int) -> None:
    records, held_out = drafts(12000, 0), drafts(12000, 1)
    learned = OnlineCalibration(GAMMA)
    shown(learned, records, step)
    often = slice(2)
    np.testing.assert_allclose(learned.slopes[SAMPLED, often], SLOPES[often], atol=0.1)
    np.testing.assert_allclose(learned.shifts[SAMPLED, often], SHIFTS[often], atol=0.15)
    raw, online = quality(held_out), quality(held_out, learned.table().by_class[SAMPLED])
    fitted = quality(held_out, fit_joint(records))
    assert sum(online.ece) < 0.4 * sum(raw.ece)
    assert sum(online.ece) < sum(fitted.ece) + 0.03


def test_it_follows_a_change() -> None:
    online = OnlineCalibration(GAMMA)
    shown(online, drafts(20000, 0))
    shown(online, drafts(20000, 1, slopes=SLOPES + 0.5))
    np.testing.assert_allclose(online.slopes[SAMPLED, :2], SLOPES[:2] + 0.5, atol=0.2)


@pytest.mark.parametrize("source", ["model", "across"])
def test_classes_are_separate_and_other_sources_unchanged(source: str) -> None:
    online, learned = OnlineCalibration(GAMMA, sources=[source]), CLASSES.index(f"sampled, {source}")
    for seed, name in enumerate(SOURCES):
        shown(online, drafts(4000, seed, CLASSES.index(f"sampled, {name}")))
    others = np.arange(len(CLASSES)) != learned
    assert (online.slopes[others] == 1).all()
    assert (online.shifts[others] == 0).all()
    assert (online.slopes[learned] != 1).all()


def test_texts_that_repeat_are_soon_trusted() -> None:
    """All drafts from other texts are accepted, where confidences of 0.88 were calibrated on texts that differ."""
    online, case = OnlineCalibration(GAMMA, sources=["across"]), CLASSES.index("greedy, across")
    count = 1000
    stated, whole = np.full((count, GAMMA), 0.88, dtype=np.float32), np.full(count, GAMMA)
    shown(online, Records(stated, whole, whole, np.full(count, case)))
    inverse, shifts = online.table().parameters(GAMMA, torch.device("cpu"))
    assert bool((torch.sigmoid(inverse[case] * torch.logit(torch.tensor(0.88)) + shifts[case]) > 0.96).all())


def test_it_starts_from_the_profiles() -> None:
    table = CalibrationTable.of({CLASSES[SAMPLED]: Calibration((2.0,) * GAMMA, (0.5,) * GAMMA)}, GAMMA)
    online = OnlineCalibration(GAMMA + 3, table)
    both = (each.parameters(GAMMA + 3, torch.device("cpu")) for each in (online.table(), table))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_it_stays_finite_when_all_drafts_fail() -> None:
    records, online = drafts(30000, 0), OnlineCalibration(GAMMA)
    shown(online, Records(records.confidence * 0 + 1, records.verify_lens, records.accepted * 0, records.classes), 64)
    inverse, shifts = online.table().parameters(GAMMA, torch.device("cpu"))
    assert bool(torch.isfinite(inverse).all() and torch.isfinite(shifts).all() and (inverse > 0).all())
    assert float(torch.sigmoid(inverse[SAMPLED, 0] * 16.6 + shifts[SAMPLED, 0])) < 0.05
