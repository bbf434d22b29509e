"""Calibration: fits against known truth, and censoring."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from outrider.kernels.drafts import weigh_drafts
from outrider.scheduler.calibration.classes import CLASSES, classes_of
from outrider.scheduler.calibration.fit import fit_joint, fit_table
from outrider.scheduler.calibration.model import Calibration, ece, quality, sigmoid
from outrider.scheduler.calibration.records import Recorder, Records
from outrider.scheduler.calibration.table import CalibrationTable

TEMPERATURES = np.array([1.6, 2.2, 0.7, 1.3, 1.0])
SHIFTS = np.array([-0.4, 0.2, 0.0, -0.8, 0.5])


def synthetic(
    count: int,
    seed: int,
    temperatures: np.ndarray = TEMPERATURES,
    shifts: np.ndarray | float = 0.0,
    censor: str = "none",
    case: int = 0,
) -> Records:
    """Records with a true acceptance of sigmoid(logit(c) / T + b).

    censor: "none" verifies all, "survival" the drafts likely to survive, "random" a random number.
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
    return Records(confidence, verify_lens, np.minimum(accepted, verify_lens), np.full(count, case))


@pytest.mark.parametrize("censor", ["none", "survival"])
def test_overconfident_survivals_come_within_two_percent_on_held_out_records(censor):
    overconfident = np.array([2.0, 2.5, 1.8, 2.2, 1.5])
    fitted = fit_joint(synthetic(20_000, 0, overconfident, censor=censor), held_out=synthetic(20_000, 1, overconfident))
    assert max(fitted.ece_before) > 0.05
    assert max(fitted.ece_after) <= 0.02
    assert fitted.num_samples == 20_000


@pytest.mark.parametrize("censor", ["none", "survival", "random"])
def test_joint_fit_recovers_the_parameters_of_the_records(censor):
    fitted = fit_joint(synthetic(60_000, 2, TEMPERATURES, SHIFTS, censor))
    assert fitted.method == "joint"
    assert np.array(fitted.temperatures) == pytest.approx(TEMPERATURES, rel=0.12)
    assert np.array(fitted.shifts) == pytest.approx(SHIFTS, abs=0.2)


def test_censored_positions_are_no_rejections():
    records = synthetic(5000, 3, censor="random")
    hidden = records.confidence.copy()
    hidden[~records.verified] = 0.999
    changed = Records(hidden, records.verify_lens, records.accepted, records.classes)
    assert fit_joint(changed) == fit_joint(records)
    as_rejections = Records(records.confidence, np.full(len(records), records.gamma), records.accepted, records.classes)
    assert np.abs(np.array(fit_joint(as_rejections).shifts) - fit_joint(records).shifts).max() > 0.5


def test_censoring_by_confidence_does_not_move_the_error():
    """Only drafts are recorded that a planner chose to verify."""
    errors = quality(synthetic(60_000, 4, np.ones(5), censor="survival"))
    assert max(errors.ece) < 0.02
    assert errors.samples[0] > errors.samples[4] > 0


def test_without_records_confidences_stay():
    none = fit_joint(synthetic(50, 6).select(np.array([], dtype=np.int64)))
    assert none.temperatures == (1.0,) * 5
    assert none.shifts == (0.0,) * 5


def test_ece_of_small_cases():
    assert ece(np.array([0.1, 0.1, 0.9, 0.9]), np.array([0, 0, 1, 1])) == pytest.approx(0.1)
    assert ece(np.array([0.5, 0.5]), np.array([1, 0])) == pytest.approx(0.0)
    assert ece(np.array([1.0]), np.array([1])) == 0.0


def calibrated(table: CalibrationTable, confidence: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    nothing = torch.zeros(confidence.shape, dtype=torch.int64)
    parameters = table.parameters(confidence.shape[1], confidence.device)
    return weigh_drafts(nothing, confidence, classes, classes, torch.full((len(CLASSES), 1), -1), parameters)[0]


def test_each_request_is_calibrated_as_its_case_wants():
    first, second = Calibration((0.5, 2.0, 1.0), (0.0, 0.3, -1.0)), Calibration((1.0, 3.0, 0.7))
    table = CalibrationTable.of({CLASSES[1]: first, CLASSES[2]: second}, 3)
    one = torch.tensor([0.2, 0.9, 0.5])
    applied = calibrated(table, one.repeat(4, 1), torch.tensor([0, 1, 2, 3]))
    assert applied[[0, 3]].flatten().tolist() == pytest.approx(one.tolist() * 2, rel=1e-6)
    assert applied[1].tolist() == pytest.approx(first.apply(one[None].numpy())[0].tolist(), rel=1e-5)
    assert applied[2].tolist() == pytest.approx(second.apply(one[None].numpy())[0].tolist(), rel=1e-5)
    with pytest.raises(ValueError, match="fitted for gamma 3, the drafter gives 2"):
        table.parameters(2, torch.device("cpu"))


def test_positions_after_the_last_fitted_one_are_calibrated_like_it():
    table = CalibrationTable.of({CLASSES[1]: Calibration((0.5, 2.0, 0.7), (0.0, 0.3, -1.0))}, 3)
    long, classes = torch.rand(4, 6), torch.tensor([1, 0, 1, 3])
    applied = calibrated(table, long, classes)
    assert torch.equal(applied[:, :3], calibrated(table, long[:, :3], classes))
    for position in range(3, 6):
        assert torch.equal(applied[:, position], calibrated(table, long[:, [0, 1, position]], classes)[:, 2])
    assert not torch.equal(applied[0, 3:], long[0, 3:])


def test_the_case_is_known_before_the_draw():
    temperatures, seeded = torch.tensor([0.0, 0.0, 0.7, 1.0, 1.0]), torch.tensor([False, True, False, False, True])
    looked_up = torch.tensor([False, True, True, False, False])
    named = [CLASSES[place] for place in classes_of(temperatures, seeded) + looked_up]
    assert named == ["greedy, model", "greedy, lookup", "sampled, lookup", "sampled, model", "seeded, model"]
    assert CLASSES[classes_of(temperatures, seeded)[2]] == "sampled, model"


def of_all_classes(count: int, seed: int, shifts: Sequence[float]) -> Records:
    """Records of every case, each with its own shift."""
    return Records.concatenate(
        [synthetic(count, seed + 10 * case, np.ones(5), shift, case=case) for case, shift in enumerate(shifts)]
    )


def test_cases_with_opposite_errors_are_corrected_separately():
    """A common calibration fails, because the errors cancel out."""
    shifts = (-0.9, 0.9, 0.9, -0.9, 0.9, -0.9, 0.9, -0.9, -0.9, 0.9, 0.9, -0.9)
    fitted, held_out = of_all_classes(20_000, 0, shifts), of_all_classes(20_000, 1, shifts)
    for found in fit_table(fitted, held_out, dataset="synthetic").by_class:
        assert max(found.ece_before) > 0.05
        assert max(found.ece_after) < 0.02
    together = fit_joint(fitted)
    assert (
        max(max(quality(held_out.select(held_out.classes == case), together).ece) for case in range(len(CLASSES)))
        > 0.05
    )


@pytest.mark.parametrize("count", [30, 300, 3000])
def test_a_calibration_is_never_worse_than_none_on_held_out_records(count):
    """The confidences are right and the records few, so a fit would follow chance."""
    kept = 0
    for seed in range(8):
        fitted, held_out = (
            of_all_classes(count, seed, (0.0,) * len(CLASSES)),
            of_all_classes(count, 100 + seed, (0.0,) * len(CLASSES)),
        )
        for found in fit_table(fitted, held_out, dataset="synthetic").by_class:
            assert sum(found.ece_after) <= sum(found.ece_before)
            assert found.is_identity or sum(found.ece_after) < sum(found.ece_before)
            kept += found.is_identity
    assert kept > 0


def test_right_confidences_have_the_error_of_chance():
    errors = [quality(synthetic(400, seed, np.ones(5))) for seed in range(60)]
    assert np.mean([e.ece for e in errors], 0) == pytest.approx(np.mean([e.ece_by_chance for e in errors], 0), rel=0.1)
    wrong = quality(synthetic(4000, 0, np.ones(5), -1.0))
    assert min(wrong.ece) > 4 * max(wrong.ece_by_chance)


def test_positions_without_records_can_be_saved(tmp_path):
    records = synthetic(500, 8)
    short = Records(records.confidence, np.ones(500, dtype=np.int64), np.minimum(records.accepted, 1), records.classes)
    table = fit_table(short, short, dataset="a name", verification="block")
    assert table.by_class[0].samples == (500, 0, 0, 0, 0)
    path = tmp_path / "short.json"
    path.write_text(json.dumps(table.to_json()))
    back = CalibrationTable.load(path)
    assert (back.by_class, back.dataset, back.verification) == (table.by_class, "a name", "block")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("{}", "is no calibration"),
        ('{"dataset": ""}', "'cases'"),
        (json.dumps({"dataset": "", "cases": {case: {"temperatures": [1, 0]} for case in CLASSES}}), "above 0"),
        (json.dumps({"dataset": "", "cases": {case: {"temperatures": [1, 2]} for case in CLASSES[:-1]}}), CLASSES[-1]),
        ("[]", "is no calibration"),
    ],
)
def test_bad_files_are_explained(text, reason, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason) as error:
        CalibrationTable.load(path)
    assert "bad.json" in str(error.value)


def test_recorder_keeps_the_last_blocks_in_order():
    records = synthetic(100, 10, censor="random")
    recorder = Recorder(16, 5)
    for start in range(0, 100, 7):
        part = records.select(np.arange(start, min(start + 7, 100)))
        recorder.record(part.confidence, part.verify_lens, part.accepted, part.classes)
        kept, expected = recorder.records(), records.select(np.arange(max(start + 7 - 16, 0), start + 7).clip(max=99))
        if start + 7 <= 100:
            for name in ("confidence", "verify_lens", "accepted", "classes"):
                assert np.array_equal(getattr(kept, name), getattr(expected, name))
    assert recorder.total == 100
    assert len(recorder) == 16
    recorder.record(records.confidence, records.verify_lens, records.accepted, records.classes)
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
