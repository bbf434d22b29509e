"""Simulated requests arrive and fare as their parameters say."""

from __future__ import annotations

from itertools import islice, takewhile

import numpy as np
import pytest

from outrider.scheduler.simulation.workload import Acceptance, Requests, Workload


def arrivals_until(workload: Workload, seconds: float, seed: int = 0) -> np.ndarray:
    return np.array(list(takewhile(lambda t: t < seconds, workload.arrival_times(np.random.default_rng(seed)))))


@pytest.mark.parametrize("kind", ["poisson", "bursty"])
def test_as_many_arrive_as_asked_and_bursts_only_where_asked(kind: str) -> None:
    times = arrivals_until(Workload(arrivals=kind, rate=5.0, burst_seconds=10.0), 10_000.0)
    assert np.all(np.diff(times) > 0)
    assert len(times) == pytest.approx(50_000, rel=0.02 if kind == "poisson" else 0.1)
    counts = np.histogram(times, bins=1000)[0]
    dispersion = counts.var() / counts.mean()
    if kind == "poisson":
        assert dispersion == pytest.approx(1.0, abs=0.15)
    else:
        assert dispersion > 10


def test_closed_users_come_at_once() -> None:
    assert list(Workload(concurrency=3).arrival_times(np.random.default_rng(0))) == [0.0] * 3


def test_requests_are_the_same_however_many_are_drawn_at_a_time() -> None:
    workload = Workload(level=5.0, level_share=0.5, arrivals="poisson", rate=1.0)
    whole, parts = Requests(workload, 7), Requests(workload, 7)
    once = whole.draw(100)
    pieces = [parts.draw(n) for n in (1, 30, 69)]
    for name, values in once.items():
        np.testing.assert_array_equal(values, np.concatenate([piece[name] for piece in pieces]))
    assert list(islice(whole.arrivals, 50)) == list(islice(parts.arrivals, 50))
    assert once["prompt"].tolist() != Requests(workload, 8).draw(100)["prompt"].tolist()


def test_lengths_and_levels_have_their_means() -> None:
    drawn = Requests(Workload(prompt=300, output=100, level=5.0, level_share=0.25), 0).draw(40_000)
    assert drawn["prompt"].mean() == pytest.approx(300, rel=0.01)
    assert drawn["output"].mean() == pytest.approx(100, rel=0.01)
    assert (drawn["level"] == 5.0).mean() == pytest.approx(0.25, abs=0.01)
    assert set(drawn["level"]) == {0.0, 5.0}


def test_confidences_are_calibrated_unless_told_otherwise() -> None:
    model, rng = Acceptance([0.9, 0.7, 0.5], unseen=1.0), np.random.default_rng(0)
    confidence, accepted = model.draft(rng.standard_normal(100_000), rng.standard_normal(100_000), rng)
    for low in np.arange(0, 1, 0.1):
        inside = (confidence >= low) & (confidence < low + 0.1)
        assert accepted[inside].mean() == pytest.approx(confidence[inside].mean(), abs=0.02)
    over = Acceptance([0.9, 0.7, 0.5], unseen=1.0, overconfidence=2.0)
    confidence, accepted = over.draft(rng.standard_normal(100_000), rng.standard_normal(100_000), rng)
    assert confidence[confidence > 0.9].mean() > accepted[confidence > 0.9].mean() + 0.03


def test_without_any_spread_acceptance_is_what_was_asked() -> None:
    model = Acceptance([0.9, 0.25, 1.0], difficulty=0, drift=0, seen=0, unseen=0)
    confidence, accepted = model.draft(np.zeros(2), np.zeros(2), np.random.default_rng(0))
    np.testing.assert_allclose(accepted, [[0.9, 0.25, 1.0]] * 2, atol=1e-6)
    np.testing.assert_allclose(confidence, accepted)


def test_drift_stays_standard_normal_and_remembers() -> None:
    model, rng = Acceptance([0.5], memory=10), np.random.default_rng(0)
    start = drift = rng.standard_normal(20_000)
    for _ in range(10):
        drift = model.drift_step(drift, rng)
    assert drift.std() == pytest.approx(1.0, abs=0.02)
    assert np.corrcoef(start, drift)[0, 1] == pytest.approx(0.9**10, abs=0.03)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"arrivals": "sometimes"}, "closed, poisson, bursty"),
        ({"arrivals": "poisson"}, "rate above 0"),
        ({"concurrency": 0}, "at least 1"),
        ({"burst": 5.0}, "below 5"),
        ({"level_share": 2.0}, "level_share"),
    ],
)
def test_workloads_that_make_no_sense_are_refused(wrong: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Workload(**wrong)


@pytest.mark.parametrize("wrong", [{"conditional": []}, {"conditional": [1.2]}, {"conditional": [0.5], "memory": 0.0}])
def test_acceptance_that_makes_no_sense_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"0\.\.1|memory"):
        Acceptance(**wrong)
