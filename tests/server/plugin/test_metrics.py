"""Speculation's counters, and detection of a useless drafter."""

import numpy as np
import pytest
from planning import step_drafts

from outrider.scheduler.calibration.classes import CLASSES
from outrider.scheduler.contract import Budget
from outrider.server.plugin.decode.metrics import SpeculationMetrics

GAMMA = 4
GREEDY = {"sampling": "greedy", "source": "model"}


@pytest.fixture
def metrics(registry):
    return SpeculationMetrics(GAMMA, "test", registry)


def observe(metrics, draft_lens, verify_lens, accept_lens, confidence=0.5, budget=None, classes=None, tokens=None):
    count = len(draft_lens)
    given = {"draft_lens": draft_lens, "classes": classes or [0] * count, "tokens": tokens or accept_lens}
    arrays = {name: np.array(each) for name, each in given.items()}
    shown = np.full((count, GAMMA), confidence, dtype=np.float32)
    metrics.drafted(step_drafts(shown, np.array(verify_lens), np.array(accept_lens), budget=budget, **arrays))
    metrics.flush()


def test_positions_after_a_rejection_are_unobserved(metrics, value):
    # accepted all 3; rejected at the 2nd of 4; verified none; rejected at once
    observe(metrics, [4, 4, 4, 4], [3, 4, 0, 1], [4, 2, 1, 1], budget=Budget(draft=True, tokens=9))
    assert [value("outrider_verified_position_total", position=k, **GREEDY) for k in (1, 2, 3, 4)] == [3, 2, 1, 0]
    assert [value("outrider_accepted_position_total", position=k, **GREEDY) for k in (1, 2, 3, 4)] == [2, 1, 1, 0]
    assert [value("outrider_expected_position_total", position=k, **GREEDY) for k in (1, 2, 3, 4)] == [1.5, 1, 0.5, 0]
    assert value("outrider_drafted_tokens_total") == 16
    assert value("outrider_budget_tokens_total") == 9
    assert value("outrider_verified_tokens_total") == 8
    assert value("outrider_accepted_tokens_total") == 4
    assert value("outrider_wasted_tokens_total") == 4
    assert value("outrider_accepted_length_sum") == 8
    assert value("outrider_accepted_length_count") == 4
    assert value("outrider_decode_steps_total") == 1
    assert value("outrider_request_steps_total") == 4
    assert value("outrider_undrafted_steps_total") == 0
    observe(metrics, [0], [0], [1], budget=Budget(draft=False, tokens=0))
    assert value("outrider_undrafted_steps_total") == 1


def test_each_case_is_counted_separately(metrics, value):
    names = ["greedy, lookup", "sampled, model", "sampled, model"]
    observe(metrics, [4] * 3, [1, 2, 2], [2, 3, 1], classes=[CLASSES.index(name) for name in names])
    counted = {}
    for case in CLASSES:
        labels = dict(zip(("sampling", "source"), case.split(", "), strict=True))
        counted[case] = [
            sum(value(f"outrider_{kind}_position_total", position=k, **labels) for k in (1, 2, 3, 4))
            for kind in ("verified", "accepted")
        ]
        middle = value("outrider_calibration_observed_total", confidence="0.55", **labels)
        assert middle == counted[case][0]
    assert counted == {case: [0, 0] for case in CLASSES} | {"greedy, lookup": [1, 1], "sampled, model": [3, 2]}


def test_tokens_after_an_answers_end_are_not_counted(metrics, value):
    observe(metrics, [2], [2], [3], tokens=[2])  # the second draft ended the answer
    assert value("outrider_accepted_tokens_total") == 2
    assert value("outrider_accepted_length_sum") == 2
    assert value("outrider_accepted_length_count") == 1


def test_the_calibration_error_can_be_read_from_the_bins(metrics, value):
    def ece():
        bins = [f"{(b + 0.5) / 10:.2f}" for b in range(10)]
        kinds = ("observed", "accepted", "expected")
        return [
            np.array([value(f"outrider_calibration_{kind}_total", confidence=b, **GREEDY) for b in bins])
            for kind in kinds
        ]

    before = ece()
    for _ in range(10):
        observe(metrics, [1] * 10, [1] * 10, [2] * 9 + [1], confidence=0.65)  # 90 % accepted, 65 % expected
    observed, accepted, expected = (now - then for now, then in zip(ece(), before, strict=True))
    assert observed.sum() == 100
    assert np.abs(expected - accepted).sum() / observed.sum() == pytest.approx(0.25, abs=1e-6)


def test_predicted_time_is_counted_with_the_time_taken(metrics, value):
    metrics.observe_time(0.03, None)
    metrics.flush()
    assert value("outrider_predictable_step_seconds_total") == 0
    metrics.observe_time(0.03, 0.02)
    metrics.observe_time(0.03, 0.04)
    metrics.flush()
    assert value("outrider_predictable_step_seconds_total") == pytest.approx(0.06)
    assert value("outrider_predicted_step_seconds_total") == pytest.approx(0.06)
    assert value("outrider_step_prediction_error_seconds_total") == pytest.approx(0.02)
    assert value("outrider_step_seconds_count") == 3


def test_a_collapsed_drafter_is_reported_and_recovers(metrics, value, caplog):
    four = [4] * 1024
    observe(metrics, four, four, [3] * 1024)
    for _ in range(5):
        observe(metrics, four, four, [1] * 1024)
    assert value("outrider_acceptance_collapsed") == 0
    for _ in range(5):
        observe(metrics, four, four, [1] * 1024)
    assert value("outrider_acceptance_collapsed") == 1
    assert "does not fit" in caplog.text
    for _ in range(5):
        observe(metrics, four, four, [3] * 1024)
    assert value("outrider_acceptance_collapsed") == 0
