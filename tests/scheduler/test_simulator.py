"""The simulator agrees with what can be worked out by hand, loses no token and shows planners the past only."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.cost.step_times import Point
from outrider.scheduler.cost.synthetic import SyntheticCost
from outrider.scheduler.planners.asynchronous import Asynchronous
from outrider.scheduler.planners.base import Budget, FinishedStep, Planner, StepView
from outrider.scheduler.planners.baselines import StaticGamma, Threshold, VerifyAll
from outrider.scheduler.planners.synchronous import Synchronous
from outrider.scheduler.simulation.simulator import Simulation
from outrider.scheduler.simulation.workload import Acceptance, Workload

GAMMA = 3
STEADY = {"difficulty": 0.0, "drift": 0.0, "seen": 0.0, "unseen": 0.0}


def constant_cost(seconds: float = 0.01, draft: float = 0.0) -> StepCost:
    points = [Point(r, r * n, 0, (seconds,)) for r in (1, 16384) for n in (1, 8)]
    return StepCost([*points, *([Point(1, 0, 0, (draft,), True), Point(16384, 0, 0, (draft,), True)] if draft else [])])


def long_answer(tokens: int = 4001) -> Workload:
    return Workload(concurrency=1, output=tokens, spread=0.0)


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9])
def test_one_request_is_as_fast_as_theory(chance: float) -> None:
    """E[tokens of a step] = (1 - p^(gamma+1)) / (1 - p)."""
    acceptance = Acceptance([chance] * GAMMA, **STEADY)
    result = Simulation(VerifyAll(), constant_cost(0.01, 0.002), acceptance, long_answer(10**6), noise=0).run(40.0)
    tokens = (1 - chance ** (GAMMA + 1)) / (1 - chance)
    deviation = 0 if chance == 0 else 4 * GAMMA / 2 / np.sqrt(result.totals.steps)
    assert result.totals.emitted / result.totals.steps == pytest.approx(tokens, abs=deviation)
    assert result.summary()["throughput"] == pytest.approx(tokens / 0.012, abs=deviation / 0.012 + 1e-9)


def test_drafts_that_are_always_accepted_bring_gamma_plus_one_tokens_a_step() -> None:
    acceptance = Acceptance([1.0] * GAMMA, **STEADY)
    result = Simulation(VerifyAll(), constant_cost(), acceptance, long_answer(401), noise=0).run(15.0)
    summary = result.summary()
    np.testing.assert_allclose(result.speeds[1:], (GAMMA + 1) / 0.01)
    assert summary["accepted_length"] == GAMMA + 1
    assert summary["wasted"] == 0
    assert summary["verified_per_request"] == GAMMA + 1


def test_without_drafting_each_request_gets_a_token_a_step() -> None:
    acceptance = Acceptance([0.5] * GAMMA)
    workload = Workload(concurrency=40, output=50)
    result = Simulation(StaticGamma(0), constant_cost(draft=5.0), acceptance, workload, noise=0).run(20.0)
    np.testing.assert_allclose(result.speeds, 100.0)
    summary = result.summary()
    assert summary["throughput"] == pytest.approx(4000, rel=0.05)  # and the first tokens, which prefill brings
    assert summary["not_drafted"] == 1
    assert summary["concurrency"] == 40


def test_waiting_agrees_with_queueing_theory() -> None:
    """One slot, Poisson arrivals, answers of equal length: Pollaczek and Khinchine's mean wait rho S / 2 (1 - rho)."""
    service, load = 0.01, 0.6
    workload = Workload(arrivals="poisson", rate=load / service, max_running=1, output=2, spread=0.0)
    result = Simulation(StaticGamma(0), constant_cost(service), Acceptance([0.5]), workload, noise=0).run(120.0)
    assert len(result.waits) > 5000
    assert result.summary()["wait_mean"] == pytest.approx(load * service / 2 / (1 - load), rel=0.1)
    assert result.summary()["throughput"] == pytest.approx(2 * load / service, rel=0.04)


def test_prefill_stops_decoding_and_brings_the_first_token() -> None:
    workload = Workload(concurrency=1, prompt=100, output=11, spread=0.0, prefill_seconds=1e-3)
    result = Simulation(StaticGamma(0), constant_cost(), Acceptance([0.5]), workload, noise=0).run(100.0)
    np.testing.assert_allclose(result.waits, 0.1)
    np.testing.assert_allclose(result.speeds, 100.0)
    assert result.summary()["throughput"] == pytest.approx(11 / 0.2, rel=0.01)


def test_verifying_everything_observes_the_acceptance_that_was_given() -> None:
    conditional = [0.85, 0.75, 0.7, 0.65]
    spy = Spy(VerifyAll())
    workload = Workload(concurrency=500, output=64)
    Simulation(spy, constant_cost(), Acceptance(conditional), workload, seed=3).run(3.0)
    runs = np.concatenate([seen.accept_lens - 1 for seen in spy.steps[60:]])
    for k, wanted in enumerate(conditional):
        assert (runs[runs >= k] > k).mean() == pytest.approx(wanted, abs=0.01)


@dataclass
class Seen:
    view: StepView
    confidence: np.ndarray | None = None
    verify_lens: np.ndarray | None = None
    accept_lens: np.ndarray | None = None
    seconds: float | None = None


@dataclass
class Spy(Planner):
    """Passes everything on, and keeps it."""

    planner: Planner
    steps: list[Seen] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def budget(self, step: StepView) -> Budget:
        self.calls.append("budget")
        self.steps.append(Seen(step))
        return self.planner.budget(step)

    def admit(self, confidence: torch.Tensor, draft_lens: torch.Tensor, budget: Budget) -> torch.Tensor:
        self.calls.append("admit")
        self.steps[-1].confidence = confidence.numpy().copy()
        return self.planner.admit(confidence, draft_lens, budget)

    def observe(self, step: FinishedStep) -> None:
        self.calls.append("observe")
        seen = self.steps[-1]
        assert seen.view is step.view
        seen.verify_lens, seen.accept_lens, seen.seconds = step.verify_lens, step.accept_lens, step.seconds
        self.planner.observe(step)


def test_a_planner_is_shown_the_past_and_this_draft_in_that_order() -> None:
    spy = Spy(Threshold(0.4))
    Simulation(spy, constant_cost(), Acceptance([0.8] * GAMMA), Workload(concurrency=6, output=20), seed=1).run(5.0)
    assert spy.calls == ["budget", "admit", "observe"] * len(spy.steps)
    known: dict[tuple[int, int], int] = {}
    for seen in spy.steps:
        keys = list(zip(seen.view.rows.tolist(), seen.view.generations.tolist(), strict=True))
        for index, key in enumerate(keys):
            if key in known:  # what the view says is what came out of the steps before
                assert seen.view.contexts[index] == known[key]
            known[key] = seen.view.contexts[index] + seen.accept_lens[index]
    assert len({row for row, _ in known}) == 6
    assert len(known) > 50  # rows are used again, under another generation


def test_what_is_accepted_cannot_be_guessed_from_what_was_shown() -> None:
    """Tokens admitted by their confidence are accepted as often as it says, neither more nor less."""
    spy = Spy(Threshold(0.5))
    acceptance = Acceptance([0.8] * GAMMA, unseen=0.0)
    Simulation(spy, constant_cost(), acceptance, Workload(concurrency=300, output=64), seed=2).run(2.0)
    survival = np.concatenate([seen.confidence.cumprod(1) for seen in spy.steps])
    lens = np.concatenate([seen.verify_lens for seen in spy.steps])
    runs = np.concatenate([seen.accept_lens - 1 for seen in spy.steps])
    for k in range(GAMMA):
        verified = lens > k
        assert (runs[verified] > k).mean() == pytest.approx(survival[verified, k].mean(), abs=0.01)


@pytest.mark.parametrize("arrivals", ["closed", "poisson", "bursty"])
def test_no_token_is_lost_or_made_up(arrivals: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.scheduler.simulation.simulator.WARM_UP", 0.0)
    workload = Workload(arrivals=arrivals, concurrency=20, rate=20.0, max_running=16, output=40, burst_seconds=1.0)
    spy = Spy(Threshold(0.4))
    simulation = Simulation(spy, constant_cost(), Acceptance([0.8] * GAMMA), workload, seed=4)
    result = simulation.run(20.0)
    totals, slots = result.totals, simulation._slots
    assert totals.verified == sum(int(seen.verify_lens.sum()) for seen in spy.steps)
    assert totals.emitted == totals.request_steps + totals.accepted
    assert totals.emitted == sum(int(seen.accept_lens.sum()) for seen in spy.steps)
    assert totals.accepted <= totals.verified
    assert totals.tokens == result.tokens.sum() + slots.generated[slots.busy].sum()
    assert totals.tokens <= totals.emitted + simulation._number
    assert np.all(slots.generated[slots.busy] < slots.output[slots.busy])
    assert max(len(seen.view.rows) for seen in spy.steps) <= 16


@pytest.mark.parametrize("make", [VerifyAll, lambda: Asynchronous(SyntheticCost().model(7, 16), 7)])
def test_the_same_seed_gives_the_same_result(make) -> None:
    def result(seed: int):
        workload = Workload(arrivals="bursty", rate=4.0, max_running=16, output=40)
        return Simulation(make(), SyntheticCost().model(7, 16), Acceptance([0.8] * 7), workload, seed=seed).run(2.0)

    one, again, other = result(0), result(0), result(1)
    assert one.totals == again.totals
    for name in ("speeds", "waits", "tokens", "levels"):
        np.testing.assert_array_equal(getattr(one, name), getattr(again, name))
    assert one.totals != other.totals


def test_attainment_and_goodput_count_the_requests_that_got_their_level() -> None:
    workload = Workload(concurrency=50, output=30, level=150.0, level_share=0.5)
    acceptance = Acceptance([0.5] * GAMMA, difficulty=2.0)
    result = Simulation(VerifyAll(), constant_cost(), acceptance, workload, noise=0).run(10.0)
    summary, asked = result.summary(), result.levels > 0
    assert 0.3 < asked.mean() < 0.7
    assert summary["attainment"] == (result.speeds[asked] >= 150.0).mean()
    assert 0.1 < summary["attainment"] < 0.9
    served = result.tokens[~asked | (result.speeds >= 150.0)].sum() / result.tokens.sum()
    assert summary["goodput"] == pytest.approx(summary["throughput"] * served)


@pytest.mark.parametrize("size", [1, 32, 256])
def test_the_planners_are_no_worse_than_the_better_of_not_speculating_and_verifying_all(size: int) -> None:
    synthetic, acceptance = SyntheticCost(), Acceptance([0.8, 0.75, 0.7, 0.7, 0.7])
    seconds = 300 * synthetic.seconds(size, size, 0)
    found = {}
    for name, planner in {
        "off": StaticGamma(0),
        "all": VerifyAll(),
        "sync": Synchronous(synthetic.model(5, size)),
        "async": Asynchronous(synthetic.model(5, size), 5),
    }.items():
        workload = Workload(concurrency=size, output=128)
        result = Simulation(planner, synthetic.model(5, size), acceptance, workload).run(seconds)
        found[name] = result.summary()["throughput"]
    best = max(found["off"], found["all"])
    assert found["sync"] >= 0.97 * best
    assert found["async"] >= 0.97 * best
    if size == 256:
        assert found["all"] < found["off"] < found["async"]


def test_a_planner_notices_that_the_machine_is_slower_than_its_profile() -> None:
    cost = constant_cost(0.01)
    workload = Workload(concurrency=4, output=64)
    Simulation(Synchronous(cost), constant_cost(0.015), Acceptance([0.7] * GAMMA), workload).run(30.0)
    assert cost.drift.plain == pytest.approx(1.5, rel=0.02)


def test_ten_thousand_requests() -> None:
    synthetic = SyntheticCost()
    workload = Workload(concurrency=10_000, output=16)
    simulation = Simulation(
        Asynchronous(synthetic.model(7, 10_000), 7), synthetic.model(7, 10_000), Acceptance([0.7] * 7), workload
    )
    result = simulation.run(20 * synthetic.seconds(10_000, 10_000, 0))
    assert result.summary()["concurrency"] == 10_000
    assert len(result.speeds) > 1000


def test_nothing_arrives_and_nothing_breaks() -> None:
    workload = Workload(arrivals="poisson", rate=1e-6)
    result = Simulation(VerifyAll(), constant_cost(), Acceptance([0.5]), workload).run(1.0)
    assert len(result.speeds) == 0
    assert np.isnan(result.summary()["speed_mean"])


def test_a_synthetic_cost_is_what_its_formula_says() -> None:
    synthetic = SyntheticCost(base=10, token=0.5, knee=0, request=0.25, context=1e-3, draft=2, draft_request=0.5)
    cost = synthetic.model(gamma=7, max_requests=100)
    for requests, context in [(1, 0), (3, 900.0), (20, 5000.0), (100, 60_000.0)]:
        tokens = np.arange(requests, 8 * requests + 1)
        expected = [synthetic.seconds(requests, b, context) for b in tokens]
        np.testing.assert_allclose(cost.seconds(requests, tokens, context), expected, rtol=1e-9)
        assert cost.draft_seconds(requests) == pytest.approx(2e-3 + 0.5e-3 * requests)
    with pytest.raises(ValueError, match="token is 0 or more"):
        SyntheticCost(token=-1)
