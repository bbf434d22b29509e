"""Calibration: fits against brute force and known truth, censoring, and SGLang reading the same file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu
from sglang.srt.speculative.dspark_components.dspark_sts import DSparkStsCalibration

from outrider.scheduler.calibration.fit import fit_joint, fit_sts
from outrider.scheduler.calibration.model import Calibration, ece, logit, quality, roc_auc, sigmoid
from outrider.scheduler.calibration.plot import plot_reliability
from outrider.scheduler.calibration.records import Recorder, Records

TEMPERATURES = np.array([1.6, 2.2, 0.7, 1.3, 1.0])
SHIFTS = np.array([-0.4, 0.2, 0.0, -0.8, 0.5])


def synthetic(
    count: int,
    seed: int,
    temperatures: np.ndarray = TEMPERATURES,
    shifts: np.ndarray | float = 0.0,
    censor: str = "none",
) -> Records:
    """Records whose true acceptance is sigmoid(logit(c) / T + b).

    censor: "none" verifies all, "survival" what looked likely to survive, "random" a random number.
    """
    rng = np.random.default_rng(seed)
    gamma = len(temperatures)
    logits = rng.normal(1.5, 2.0, (count, gamma)) + rng.normal(0, 1, (count, 1))  # blocks are easy or hard
    accepted = (rng.random((count, gamma)) < sigmoid(logits / temperatures + shifts)).cumprod(1).sum(1)
    confidence = sigmoid(logits).astype(np.float32)
    verify_lens = np.full(count, gamma)
    if censor == "survival":
        verify_lens = (confidence.cumprod(1) > 0.3).sum(1)
    elif censor == "random":
        verify_lens = rng.integers(0, gamma + 1, count)
    return Records(confidence, verify_lens, np.minimum(accepted, verify_lens), np.ones(count, dtype=np.float32))


@pytest.mark.parametrize("fit", [fit_sts, fit_joint])
@pytest.mark.parametrize("censor", ["none", "survival"])
def test_overconfident_survivals_come_within_two_percent_on_held_out_records(fit, censor):
    overconfident = np.array([2.0, 2.5, 1.8, 2.2, 1.5])
    found = fit(synthetic(20_000, 0, overconfident, censor=censor), held_out=synthetic(20_000, 1, overconfident))
    assert max(found.ece_before) > 0.05
    assert max(found.ece_after) <= 0.02
    assert min(found.auc) > 0.7  # as the records were made
    assert found.num_samples == 20_000


@pytest.mark.parametrize("censor", ["none", "survival", "random"])
def test_joint_fit_recovers_what_the_records_were_made_with(censor):
    found = fit_joint(synthetic(60_000, 2, TEMPERATURES, SHIFTS, censor))
    assert found.method == "joint"
    assert np.array(found.temperatures) == pytest.approx(TEMPERATURES, rel=0.12)
    assert np.array(found.shifts) == pytest.approx(SHIFTS, abs=0.2)


def test_censored_positions_are_no_rejections():
    """What was not verified has no part in the fit, whatever its confidence."""
    records = synthetic(5000, 3, censor="random")
    hidden = records.confidence.copy()
    hidden[~records.verified] = 0.999
    changed = Records(hidden, records.verify_lens, records.accepted, records.temperatures)
    for fit in (fit_sts, fit_joint):
        assert fit(changed) == fit(records)
    as_rejections = Records(
        records.confidence, np.full(len(records), records.gamma), records.accepted, records.temperatures
    )
    assert np.abs(np.array(fit_joint(as_rejections).shifts) - fit_joint(records).shifts).max() > 0.5


def test_censoring_by_confidence_does_not_move_the_error():
    """Calibrated confidences stay calibrated on what a planner chose to verify."""
    found = quality(synthetic(60_000, 4, np.ones(5), censor="survival"))
    assert max(found.ece) < 0.02
    assert found.samples[0] > found.samples[4] > 0


def test_sts_is_the_best_of_its_grid_from_left_to_right():
    records, grid = synthetic(2000, 5), np.array([0.5, 0.8, 1.0, 1.5, 2.0, 3.0])
    prefix = np.ones(len(records))
    for k, found in enumerate(fit_sts(records, grid).temperatures):
        errors = []
        for temperature in grid:
            survival = prefix * sigmoid(logit(records.confidence[:, k]) / temperature)
            error = 0.0
            for low in range(15):
                inside = (survival * 15 >= low) & (survival * 15 < low + 1)
                if inside.any():
                    gap = survival[inside].mean() - (records.accepted[inside] > k).mean()
                    error += inside.mean() * abs(gap)
            errors.append(error)
        assert found == grid[np.argmin(errors)]
        prefix = prefix * sigmoid(logit(records.confidence[:, k]) / found)


def test_too_few_records_change_nothing():
    assert fit_sts(synthetic(50, 6)).temperatures == (1.0,) * 5
    none = fit_joint(synthetic(50, 6).select(np.array([], dtype=np.int64)))
    assert none.temperatures == (1.0,) * 5
    assert none.shifts == (0.0,) * 5
    assert none.auc == (None,) * 5


def test_ece_and_auc_of_small_cases():
    assert ece(np.array([0.1, 0.1, 0.9, 0.9]), np.array([0, 0, 1, 1])) == pytest.approx(0.1)
    assert ece(np.array([0.5, 0.5]), np.array([1, 0])) == pytest.approx(0.0)
    assert ece(np.array([1.0]), np.array([1])) == 0.0
    rng = np.random.default_rng(0)
    score, outcome = rng.integers(0, 6, 200) / 5, rng.random(200) < 0.4
    expected = mannwhitneyu(score[outcome], score[~outcome]).statistic / (outcome.sum() * (~outcome).sum())
    assert roc_auc(score, outcome) == pytest.approx(expected)
    assert roc_auc(score, np.zeros(200, dtype=bool)) is None


def test_apply_is_the_formula_and_leaves_zeros_and_nan():
    calibration = Calibration((0.5, 2.0, 1.0), (0.0, 0.3, -1.0))
    confidence = torch.tensor([[0.2, 0.9, 0.5], [0.0, 0.0, torch.nan], [1.0, 1.0, 1.0]])
    applied = calibration.apply(confidence)
    assert applied[0].tolist() == pytest.approx(calibration.apply_numpy(confidence[:1].numpy())[0].tolist(), rel=1e-5)
    assert applied[1, :2].tolist() == [0.0, 0.0]
    assert bool(applied[1, 2].isnan())
    assert 0.99 < float(applied[2, 1]) < 1.0
    assert confidence[0].tolist() == pytest.approx([0.2, 0.9, 0.5])
    assert Calibration.identity(3).apply(confidence) is confidence
    with pytest.raises(ValueError, match="fitted for gamma 3, the drafter gives 4"):
        calibration.apply(torch.rand(2, 4))


@pytest.mark.parametrize("fit", [fit_sts, fit_joint])
def test_sglang_reads_the_same_file(fit, tmp_path):
    path = tmp_path / "calibration.json"
    found = fit(synthetic(3000, 7), dataset="synthetic")
    found.save(path)
    assert Calibration.load(path) == found
    theirs = DSparkStsCalibration.from_json(path.read_text())
    assert tuple(theirs.temperatures) == found.temperatures
    assert theirs.dataset == "synthetic"
    assert theirs.num_samples == 3000
    assert tuple(theirs.ece_after) == found.ece_after
    assert Calibration.from_json(theirs.to_json()).temperatures == found.temperatures


def test_positions_without_records_can_be_saved(tmp_path):
    records = synthetic(500, 8)
    short = Records(
        records.confidence, np.ones(500, dtype=np.int64), np.minimum(records.accepted, 1), records.temperatures
    )
    found = fit_sts(short)
    assert found.samples == (500, 0, 0, 0, 0)
    found.save(tmp_path / "short.json")
    assert Calibration.load(tmp_path / "short.json") == found
    DSparkStsCalibration.from_json((tmp_path / "short.json").read_text())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not a calibration"),
        ("{}", "not a calibration"),
        ('{"temperatures": [1, 0]}', "above 0"),
        ("[]", "not a cal"),
    ],
)
def test_bad_files_are_explained(text, reason, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason) as error:
        Calibration.load(path)
    assert "bad.json" in str(error.value)


def test_reliability_picture(tmp_path):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    records = synthetic(2000, 9)
    plot_reliability(records, fit_sts(records), figure)
    figure.savefig(tmp_path / "reliability.png")
    assert len(figure.axes) == records.gamma
    assert (tmp_path / "reliability.png").read_bytes().startswith(b"\x89PNG")


def test_recorder_keeps_the_last_blocks_in_order():
    records = synthetic(100, 10, censor="random")
    recorder = Recorder(16, 5)
    for start in range(0, 100, 7):
        part = records.select(np.arange(start, min(start + 7, 100)))
        recorder.record(part.confidence, part.verify_lens, part.accepted, part.temperatures)
        kept, expected = recorder.records(), records.select(np.arange(max(start + 7 - 16, 0), start + 7).clip(max=99))
        if start + 7 <= 100:
            for name in ("confidence", "verify_lens", "accepted", "temperatures"):
                assert np.array_equal(getattr(kept, name), getattr(expected, name))
    assert recorder.total == 100
    assert len(recorder) == 16
    recorder.record(records.confidence, records.verify_lens, records.accepted, records.temperatures)
    assert np.array_equal(recorder.records().confidence, records.confidence[-16:])
    snapshot = recorder.records()
    recorder.clear()
    assert len(recorder.records()) == 0
    assert len(snapshot) == 16


def test_impossible_records_are_refused():
    with pytest.raises(ValueError, match="accepted <= verify_lens"):
        Records(np.zeros((1, 3)), np.array([2]), np.array([3]), np.zeros(1))
    with pytest.raises(ValueError, match=r"verify_lens is \[2\]"):
        Records(np.zeros((2, 3)), np.array([2]), np.array([1, 1]), np.zeros(2))
