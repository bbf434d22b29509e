"""Speculation's counters and the page's data, detection of a useless drafter, and counts of diffusion's rounds."""

import json

import numpy as np
import pytest
from planning import step_drafts
from prometheus_client import CollectorRegistry

from outrider.scheduler.calibration.classes import CLASSES, SOURCES
from outrider.scheduler.contract import Budget, PlannedCurve
from outrider.server.http.routes.live import merged
from outrider.server.plugin.decode.live import CURVE_POINTS, snapshot
from outrider.server.plugin.decode.metrics import SpeculationMetrics
from outrider.server.plugin.diffusion.metrics import DiffusionMetrics

GAMMA = 4
GREEDY = {"sampling": "greedy", "source": "model"}


@pytest.fixture
def metrics(registry):
    return SpeculationMetrics(GAMMA, "test", registry)


def observe(metrics, draft_lens, verify_lens, accept_lens, confidence=0.5, budget=None, classes=None):
    count = len(draft_lens)
    given = {"draft_lens": draft_lens, "classes": classes or [0] * count}
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
    counts = {"drafted_tokens": 16, "budget_tokens": 9, "verified_tokens": 8}
    counts |= {"accepted_tokens": 4, "wasted_tokens": 4, "decode_steps": 1, "request_steps": 4, "undrafted_steps": 0}
    assert {name: value(f"outrider_{name}_total") for name in counts} == counts
    assert [value(f"outrider_accepted_length_{part}") for part in ("sum", "count")] == [8, 4]
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


def test_totals_by_source(registry) -> None:
    metrics = SpeculationMetrics(3, "test", registry)
    confidence = np.array([[0.9, 0.8, 0.7], [0.9, 0.8, 0.7], [0.5, 0.5, 0.5]], dtype=np.float32)
    classes = np.array([CLASSES.index(case) for case in ("greedy, model", "sampled, model", "seeded, lookup")])
    lens, accepted = np.array([3, 3, 2]), np.array([4, 2, 3])
    for _ in range(2):
        metrics.drafted(
            step_drafts(confidence, lens, accepted, draft_lens=lens, classes=classes, budget=Budget(True, 9))
        )
        metrics.observe_time(0.5, 0.4)
        metrics.observe_prefill(64, 0.25)
        metrics.flush()
    shown = snapshot(metrics, None)
    assert json.loads(json.dumps(shown)) == shown
    assert (shown["steps"], shown["request_steps"], shown["tokens"]) == (2, 6, 18)
    assert (shown["budget"], shown["verified"], shown["accepted"], shown["wasted"]) == (18, 16, 12, 4)
    none = {"drafts": 0, "accepted": 0}
    assert shown["sources"] == {
        "model": {"drafts": 4, "accepted": 8}, "lookup": {"drafts": 2, "accepted": 4}, "across": none, "grammar": none,
    }  # fmt: skip
    assert sum(shown["calibration"]["model"]["observed"]) == 10
    assert sum(shown["calibration"]["lookup"]["expected"]) == 2
    assert (shown["timed_steps"], shown["step_seconds"]) == (2, 1.0)
    assert (shown["chunks"], shown["chunk_seconds"]) == (2, 0.5)
    assert shown["curve"] is None


def test_without_a_drafter_there_are_no_positions(registry) -> None:
    shown = snapshot(SpeculationMetrics(0, "off", registry), None)
    assert shown["sources"] == {source: {"drafts": 0, "accepted": 0} for source in SOURCES}


def test_a_long_curve_is_thinned_and_keeps_its_ends(metrics) -> None:
    curve = PlannedCurve(np.arange(1001) / 4, np.linspace(10, 20, 1001), 5, (3.0, 12.0))
    shown = snapshot(metrics, curve)["curve"]
    assert len(shown["tokens"]) == len(shown["throughput"]) == CURVE_POINTS
    assert (shown["tokens"][0], shown["tokens"][-1], shown["requests"]) == (0, 250, 5)
    assert shown["chosen"] == [3.0, 12.0]


def test_engines_are_summed_and_the_busiest_shows_its_curve() -> None:
    first = {"steps": 2.0, "levels": {"met": 1}, "bins": [1, 2], "requests": {"running": 1}, "curve": {"requests": 1}}
    two = {"steps": 3.0, "levels": {"met": 2}, "bins": [3, 4], "requests": {"running": 5}, "curve": {"requests": 5}}
    assert merged([first, two]) == {
        "steps": 5.0, "levels": {"met": 3}, "bins": [4, 6], "requests": {"running": 6}, "curve": {"requests": 5},
    }  # fmt: skip


def test_rounds_are_counted_once_and_shown_when_flushed() -> None:
    registry = CollectorRegistry()
    metrics = DiffusionMetrics(registry)
    metrics.observe(open_blocks=3, drafted=4, planned=[0, 3], accepted=[0, 1, 2], joined=1, tokens=8)
    metrics.observe(open_blocks=0, drafted=0, planned=[], accepted=[], joined=0, tokens=0)  # a prompt alone
    for _ in range(2):
        metrics.flush()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"outrider_{name}", labels)

    assert (value("diffusion_forwards_total"), value("diffusion_request_forwards_total")) == (1, 3)
    assert (value("drafted_states_total"), value("joined_commits_total"), value("diffusion_tokens_total")) == (4, 1, 8)
    assert [value("accepted_states_total", depth=depth) for depth in "123"] == [2, 1, 0]
    assert (value("planned_states_count"), value("planned_states_sum")) == (2, 3)
    assert [value("planned_states_bucket", le=le) for le in ("0.0", "2.0", "3.0")] == [1, 1, 2]
    totals = {"forwards": 1, "request_forwards": 3, "tokens": 8, "drafted": 4, "accepted": 3, "joined": 1, "planned": 2}
    assert metrics.totals == totals
