"""Data of the page: totals of the counters, and a planner's curve."""

import json

import numpy as np
from planning import step_drafts

from outrider.scheduler.calibration.classes import CLASSES, SOURCES
from outrider.scheduler.contract import Budget, PlannedCurve
from outrider.server.http.routes.live import merged
from outrider.server.plugin.decode.live import CURVE_POINTS, snapshot
from outrider.server.plugin.decode.metrics import SpeculationMetrics

GAMMA = 3


def test_totals_by_source(registry) -> None:
    metrics = SpeculationMetrics(GAMMA, "test", registry)
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


def test_a_long_curve_is_thinned_and_keeps_its_ends(registry) -> None:
    curve = PlannedCurve(np.arange(1001) / 4, np.linspace(10, 20, 1001), 5, (3.0, 12.0))
    shown = snapshot(SpeculationMetrics(GAMMA, "test", registry), curve)["curve"]
    assert len(shown["tokens"]) == len(shown["throughput"]) == CURVE_POINTS
    assert (shown["tokens"][0], shown["tokens"][-1], shown["requests"]) == (0, 250, 5)
    assert shown["chosen"] == [3.0, 12.0]


def test_engines_are_summed_and_the_busiest_shows_its_curve() -> None:
    one = {"steps": 2.0, "levels": {"met": 1}, "bins": [1, 2], "requests": {"running": 1}, "curve": {"requests": 1}}
    two = {"steps": 3.0, "levels": {"met": 2}, "bins": [3, 4], "requests": {"running": 5}, "curve": {"requests": 5}}
    assert merged([one, two]) == {
        "steps": 5.0, "levels": {"met": 3}, "bins": [4, 6], "requests": {"running": 6}, "curve": {"requests": 5},
    }  # fmt: skip
