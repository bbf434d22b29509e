"""What a planner is shown of decode steps and when, how steps are timed, and who is seen off.

Tensors live on the CPU throughout. `device="cuda"` tells Planning that they do not: it may then not read them before
the step after the next begins.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from planning import curve_cost, request

from outrider.drafters.base import Draft
from outrider.scheduler.calibration.cases import CASES
from outrider.scheduler.calibration.model import Calibration
from outrider.scheduler.calibration.table import CalibrationTable
from outrider.scheduler.planners.asynchronous import Asynchronous
from outrider.scheduler.planners.base import Budget, Planner
from outrider.scheduler.planners.synchronous import Synchronous
from outrider.server.plugin.decode.metrics import SpeculationMetrics
from outrider.server.plugin.decode.planning import Planning
from outrider.server.plugin.decode.requests import RequestTable
from outrider.server.plugin.options import RequestOptions

GAMMA = 4
ROWS = 8
PAYS = [1.0] * (2 * GAMMA + 1)
"""Seconds of a step by admitted tokens: verifying is free."""

HALVED = CalibrationTable.of(dict.fromkeys(CASES, Calibration((2.0,) * GAMMA)), GAMMA)
"""Halves the log odds of every confidence."""

on_every_device = pytest.mark.parametrize("device", ["cpu", "cuda"])


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


@pytest.fixture
def metrics(registry):
    return SpeculationMetrics(GAMMA, "test", registry)


@pytest.fixture
def value(metrics, value):
    """What a counter stands at, with all that was observed."""

    def read(*args, **labels):
        metrics.flush()
        return value(*args, **labels)

    return read


@pytest.fixture
def make(metrics):
    """make(device, cost, calibration, held): a Planning with the asynchronous planner; its plans hold for one step."""

    def make(device="cpu", cost=None, calibration=None, held=1):
        cost = cost or curve_cost(1, PAYS)
        table = RequestTable(ROWS, GAMMA, "cpu")
        return Planning(Asynchronous(cost, GAMMA, held=held), cost, calibration, table, metrics, device)

    return make


def prefill(planning, *rows, **options):
    """As the worker does before the target's forward."""
    planning.interrupt()
    params = RequestOptions(**options).to_custom_params()
    planning.requests.admit([request(custom_params=params) for _ in rows], torch.tensor(rows))


def begin(planning, *rows, contexts=10):
    count = len(rows)
    return planning.begin(np.array(rows), np.full(count, contexts), torch.zeros(count, dtype=torch.int64))


def admit(planning, step, confidence=0.9, lens=GAMMA):
    """As a drafter without lookup drafts: for those that are asked."""
    asks = torch.from_numpy(step.asks)
    tokens = torch.zeros(len(asks), GAMMA, dtype=torch.int64)
    draft = Draft(tokens, lens * asks, confidence * asks[:, None].repeat(1, GAMMA), asked=int(asks.sum()))
    return planning.admit(step, draft, 0.125)


def run(planning, *rows, accepted=1, confidence=0.9):
    """A whole step; its accept_lens, which a device may still be computing."""
    admission = admit(planning, begin(planning, *rows), confidence)
    accept_lens = torch.full((len(rows),), accepted)
    planning.finish(admission, accept_lens)
    return accept_lens


def logged(planning):
    return [step.seconds for step in planning.recording.steps]


# -- when an outcome is read ------------------------------------------------------------------------------------------


def test_on_the_host_an_outcome_is_read_when_the_planner_looks_back(make, value):
    planning = make()
    prefill(planning, 2)
    run(planning, 2, accepted=3)
    assert value("outrider_decode_steps_total") == 0
    begin(planning, 2)
    assert planning.requests.generated[2] == 3
    assert value("outrider_decode_steps_total") == 1
    assert len(planning.recording.blocks) == 1


def test_outcomes_wait_while_a_plan_holds_and_lose_nothing(make, clock, value):
    planning, prompt = make(held=3), make()
    for one in (planning, prompt):
        prefill(one, 2)
    read = []
    for _ in range(7):
        for one in (planning, prompt):
            run(one, 2, accepted=3)
        clock.now += 0.5
        read.append(int(planning.requests.generated[2]) // 3)
    assert read == [0, 0, 0, 3, 3, 3, 6]
    for one in (planning, prompt):
        one.flush()
    assert planning.requests.generated[2] == prompt.requests.generated[2] == 21
    assert planning.state() == prompt.state()
    assert value("outrider_decode_steps_total") == 14
    assert planning.cost.drift.plain == prompt.cost.drift.plain != 1


def test_outcomes_do_not_wait_where_somebody_asked_for_a_speed(make):
    planning = make(held=3)
    prefill(planning, 2, min_tokens_per_second=2.0)
    for count in range(4):
        run(planning, 2, accepted=3)
        assert planning.requests.generated[2] == 3 * count


def test_outcomes_are_read_before_metrics_are_shown_and_requests_prefilled(make, value):
    planning = make(held=9)
    prefill(planning, 2)
    run(planning, 2)
    run(planning, 2)
    planning.flush()
    assert value("outrider_decode_steps_total") == 2
    run(planning, 2)
    prefill(planning, 5)
    assert value("outrider_decode_steps_total") == 3


def test_on_a_gpu_an_outcome_is_read_when_the_step_after_the_next_begins(make, clock, value):
    planning = make("cuda")
    prefill(planning, 2, min_tokens_per_second=1.0)
    computed = run(planning, 2, accepted=-99)
    second = run(planning, 2, accepted=-99)
    assert planning.requests.generated[2] == 0
    assert value("outrider_decode_steps_total") == 0
    computed.fill_(3)  # only now the device is done with the first step
    clock.now += 2.0
    step = begin(planning, 2)
    assert planning.requests.generated[2] == 3
    assert step.view.progress == 1.5  # tokens per second: the planner may know of them
    assert value("outrider_decode_steps_total") == 1
    second.fill_(2)
    planning.finish(admit(planning, step), torch.tensor([1]))
    assert planning.requests.generated[2] == 3  # not when a step is finished either
    begin(planning, 2)
    assert planning.requests.generated[2] == 5


@on_every_device
def test_the_planner_learns_of_a_step_when_the_step_after_the_next_is_planned(make, device):
    planning = make(device)
    prefill(planning, 2)
    history = planning.planner.history

    def known():
        return history.read(np.array([2]), planning.requests.generations[[2]], 1)

    run(planning, 2, confidence=0.5)
    run(planning, 2, confidence=0.9)
    assert not known()[1].any()
    begin(planning, 2)
    survival, seen = known()
    assert seen.all()
    np.testing.assert_allclose(survival[0, 0], 0.5 ** np.arange(1, GAMMA + 1))


@on_every_device
def test_what_is_asked_for_between_steps_includes_the_last_one(make, device):
    planning = make(device)
    prefill(planning, 2)
    run(planning, 2, accepted=3, confidence=0.75)
    assert planning.state()["records"] == {
        "confidence": [[0.75] * GAMMA],
        "verify_lens": [GAMMA],
        "accepted": [2],
        "cases": [0],
    }


@on_every_device
def test_forgotten_steps_do_not_come_back(make, device):
    planning = make(device)
    prefill(planning, 2)
    for _ in range(3):
        run(planning, 2)
    planning.forget()
    prefill(planning, 2)
    state = planning.state()
    assert not any(state["steps"].values())
    assert not any(state["records"].values())
    run(planning, 2)
    run(planning, 2)
    state = planning.state()
    assert len(state["steps"]["seconds"]) == 1
    assert len(state["records"]["accepted"]) == 2


# -- how long a step took ---------------------------------------------------------------------------------------------


@on_every_device
def test_a_step_lasts_until_the_next_one_begins(make, device, clock, value):
    planning = make(device)
    prefill(planning, 2)
    for seconds in (0.25, 0.5, 0.75, 1.0):
        run(planning, 2)
        clock.now += seconds
    assert logged(planning) == ([0.25, 0.5, 0.75] if device == "cpu" else [0.25, 0.5])
    begin(planning, 2)
    assert logged(planning) == ([0.25, 0.5, 0.75, 1.0] if device == "cpu" else [0.25, 0.5, 0.75])
    step = planning.recording.steps[0]
    assert (step.requests, step.tokens, step.context, step.drafting, step.draft_seconds) == (1, 5, 10, 1, 0.125)
    assert value("outrider_step_seconds_count") == len(planning.recording.steps)
    assert planning.cost.drift.plain < 1  # they took less than the second that was measured


def test_the_cost_model_is_told_what_a_step_held(make, clock):
    seconds = [1.0, 1.125, 2.0, 4.0, 8.0]
    planning, reference = make(cost=curve_cost(1, seconds)), curve_cost(1, seconds)
    prefill(planning, 2)
    admission = admit(planning, begin(planning, 2))
    planning.finish(admission, torch.tensor([1]))
    clock.now += 1.5
    begin(planning, 2)
    assert admission.verify_lens.tolist() == [1]
    reference.observe(1, 2, 10.0, 1, 1.5, 0.125)
    assert planning.cost.drift.plain == reference.drift.plain != 1


def test_predicted_times_are_compared_with_those_of_their_steps(make, clock, value):
    planning = make()
    prefill(planning, 2)
    run(planning, 2)
    clock.now += 1.5
    begin(planning, 2)
    assert value("outrider_predicted_step_seconds_total") == 1.0
    assert value("outrider_predictable_step_seconds_total") == 1.5


def test_a_state_read_between_steps_does_not_lose_the_time_of_the_last_one(make, clock):
    planning = make("cuda")
    prefill(planning, 2)
    run(planning, 2)
    planning.state()
    assert logged(planning) == []
    clock.now += 0.5
    begin(planning, 2)
    assert logged(planning) == [0.5]


@on_every_device
def test_a_step_that_a_prefill_follows_is_not_timed(make, device, clock, value):
    planning = make(device)
    prefill(planning, 2)
    run(planning, 2)
    clock.now += 0.5
    prefill(planning, 3)
    clock.now += 5.0
    run(planning, 2, 3)
    begin(planning, 2, 3)
    planning.state()
    assert len(planning.recording.steps) == 1
    assert planning.recording.steps[0].requests == 2
    assert value("outrider_decode_steps_total") == 2  # counted all the same


@on_every_device
def test_the_cost_model_does_not_hear_of_a_step_that_a_prefill_follows(make, device, clock):
    planning = make(device)
    prefill(planning, 2)
    run(planning, 2)
    clock.now += 5.0
    prefill(planning, 3)
    begin(planning, 2, 3)
    planning.state()
    assert planning.cost.drift.plain == 1


def test_on_a_gpu_the_step_before_the_interrupted_one_is_timed(make, clock):
    planning = make("cuda")
    prefill(planning, 2)
    run(planning, 2)
    clock.now += 0.25
    run(planning, 2)
    clock.now += 0.5
    prefill(planning, 3)
    begin(planning, 2, 3)
    assert logged(planning) == [0.25]


@on_every_device
def test_a_step_that_was_never_finished_is_not_timed_nor_the_one_before_it_twice(make, device, clock):
    planning = make(device)
    prefill(planning, 2)
    run(planning, 2)
    clock.now += 0.25
    begin(planning, 2)
    clock.now += 0.5
    run(planning, 2)
    clock.now += 1.0
    begin(planning, 2)
    planning.state()
    assert logged(planning) == [0.25, 1.0]


def test_seconds_of_drafting_and_planning_are_counted_once_per_step(make, clock, value):
    class Slow(Asynchronous):
        """Every call takes a while."""

        def budget(self, step):
            clock.now += 1.0
            return super().budget(step)

        def admit(self, *args):
            clock.now += 10.0
            return super().admit(*args)

        def observe(self, *args):
            clock.now += 100.0
            super().observe(*args)

    planning = make()
    planning.plan_by(Slow(planning.cost, GAMMA, held=1), planning.cost, None)
    prefill(planning, 2)
    run(planning, 2)
    run(planning, 2)
    planning.flush()
    assert value("outrider_planner_seconds_sum") == 222
    assert value("outrider_planner_seconds_count") == 2
    assert value("outrider_draft_seconds_total") == 0.25


# -- rows taken over --------------------------------------------------------------------------------------------------


def test_tokens_of_the_request_before_do_not_count_for_the_one_that_took_over_its_row(make):
    planning = make("cuda")
    prefill(planning, 2, 5)
    run(planning, 2, 5, accepted=4)
    prefill(planning, 2)
    run(planning, 2, 5, accepted=1)
    begin(planning, 2, 5)  # reads the first step
    assert planning.requests.generated[[2, 5]].tolist() == [0, 4]
    planning.state()
    assert planning.requests.generated[[2, 5]].tolist() == [1, 5]


# -- another plan -----------------------------------------------------------------------------------------------------


@on_every_device
def test_steps_under_way_are_shown_to_the_planner_that_planned_them(make, device, clock):
    planning = make(device)
    prefill(planning, 2)
    run(planning, 2, confidence=0.5)
    clock.now += 0.25
    run(planning, 2, accepted=4)
    before, cost = planning.planner, planning.cost
    other = curve_cost(1, PAYS)
    planning.plan_by(Asynchronous(other, GAMMA, held=1), other, HALVED)
    drift = cost.drift.plain
    assert drift != 1
    assert planning.requests.generated[2] == 5
    run(planning, 2)
    clock.now += 0.25
    run(planning, 2)
    begin(planning, 2)  # on a GPU this reads the first step of the new planner, which knows no other
    assert other.drift.plain != 1
    assert cost.drift.plain == drift
    before.budget(begin(planning, 2).view)
    assert before.history.read(np.array([2]), planning.requests.generations[[2]], 1)[1].all()


@on_every_device
def test_the_step_before_another_plan_is_not_timed(make, device, clock):
    planning = make(device)
    prefill(planning, 2)
    run(planning, 2)
    other = curve_cost(1, PAYS)
    planning.plan_by(Asynchronous(other, GAMMA, held=1), other, None)
    clock.now += 5.0  # a profile was read
    begin(planning, 2)
    planning.state()
    assert logged(planning) == []
    assert other.drift.plain == 1


def test_confidences_are_calibrated_for_the_planner_and_recorded_as_they_are(make):
    planning = make(calibration=HALVED)
    prefill(planning, 2)
    admission = admit(planning, begin(planning, 2), confidence=0.9)  # odds of 9 to 1 become 3 to 1
    torch.testing.assert_close(admission.confidence, torch.full((1, GAMMA), 0.75))
    planning.finish(admission, torch.tensor([1]))
    np.testing.assert_allclose(planning.state()["records"]["confidence"], 0.9, rtol=1e-6)
    begin(planning, 2)
    begin(planning, 2)
    survival, _ = planning.planner.history.read(np.array([2]), planning.requests.generations[[2]], 1)
    np.testing.assert_allclose(survival[0, 0], 0.75 ** np.arange(1, GAMMA + 1), rtol=1e-6)


def test_the_planner_admits_by_calibrated_confidences(make):
    planning = make()
    prefill(planning, 2)
    dear = curve_cost(1, [1.0, 1.8, 2.6, 3.4, 4.2])
    admitted = []
    for calibration in (None, HALVED):
        planning.plan_by(Synchronous(dear), None, calibration)
        admitted += admit(planning, begin(planning, 2), confidence=0.9).verify_lens.tolist()
    assert admitted == [1, 0]  # 1.9 tokens in 1.8 s, or 1.75, against one in a second


# -- requests that the planner does not decide for --------------------------------------------------------------------


def test_every_draft_of_an_unplanned_request_is_verified_though_drafting_does_not_pay(make):
    planning = make(cost=curve_cost(2, [1.0] + [100.0] * (2 * GAMMA), draft=0.5))
    prefill(planning, 2)
    prefill(planning, 5, planned=False)
    step = begin(planning, 2, 5)
    assert not step.budget.draft
    assert step.drafts
    assert admit(planning, step, lens=3).verify_lens.tolist() == [0, 3]


def test_a_planner_that_does_not_draft_admits_nothing_of_others(make):
    class Never(Planner):
        def budget(self, step):
            return Budget(draft=False, tokens=None)

        def admit(self, confidence, draft_lens, budget):
            return draft_lens

    planning = make()
    planning.plan_by(Never(), None, None)
    prefill(planning, 2)
    prefill(planning, 5, planned=False)
    assert admit(planning, begin(planning, 2, 5)).verify_lens.tolist() == [0, GAMMA]
    assert admit(planning, begin(planning, 2)).verify_lens.tolist() == [0]


def test_unplanned_requests_do_not_use_up_the_budget_of_others(make):
    planning = make(cost=curve_cost(2, [1.0] * 3 + [100.0] * (2 * GAMMA - 2)))
    prefill(planning, 2)
    prefill(planning, 5, planned=False)
    step = begin(planning, 2, 5)
    assert step.budget.tokens == 2
    assert admit(planning, step).verify_lens.tolist() == [2, GAMMA]


def test_a_step_in_which_nobody_may_draft_does_not_draft(make, value):
    planning = make()
    prefill(planning, 2, enabled=False, planned=False)
    step = begin(planning, 2)
    assert not step.drafts
    admission = admit(planning, step, lens=0)
    assert admission.verify_lens.tolist() == [0]
    planning.finish(admission, torch.tensor([1]))
    planning.flush()
    assert value("outrider_undrafted_steps_total") == 1
    assert len(planning.recording.blocks) == 0


def test_padded_requests_are_told_apart_in_the_order_of_the_batch(make):
    planning = make()
    prefill(planning, 2)
    prefill(planning, 5, padded=True, planned=False)
    assert begin(planning, 5, 2).entries.padded.tolist() == [True, False]
    assert begin(planning, 2, 5).entries.planned.tolist() == [True, False]


# -- who drafts -------------------------------------------------------------------------------------------------------


class Half(Planner):
    """The model drafts for the first request only; what prompt lookup finds is verified whole."""

    def budget(self, step):
        return Budget(draft=True, tokens=None, ask=np.arange(len(step.rows)) == 0)

    def admit(self, confidence, draft_lens, budget):
        return draft_lens

    def observe(self, step, survival, verify_lens, accept_lens, asked, seconds, looked_up=None):
        self.asked, self.looked_up, self.survival = asked.tolist(), looked_up.tolist(), survival


@on_every_device
def test_the_planner_hears_who_was_asked_and_whose_draft_was_looked_up(make, device, clock):
    planning = make(device)
    half = Half()
    planning.plan_by(half, planning.cost, None)
    prefill(planning, 2, 5)
    prefill(planning, 3, enabled=False)
    prefill(planning, 6, planned=False)
    step = begin(planning, 2, 5, 3, 6)
    assert step.asks.tolist() == [True, False, False, True]
    draft = Draft(
        torch.zeros(4, GAMMA, dtype=torch.int64),
        torch.tensor([GAMMA, 3, 0, GAMMA]),
        torch.full((4, GAMMA), 0.5),
        looked_up=torch.tensor([False, True, True, False]),
        asked=2,
    )
    admission = planning.admit(step, draft, 0.125)
    assert admission.verify_lens.tolist() == [GAMMA, 3, 0, GAMMA]
    planning.finish(admission, torch.ones(4, dtype=torch.int64))
    clock.now += 0.5
    begin(planning, 2)
    planning.state()
    assert half.asked == [True, False, False, True]
    assert half.looked_up == [False, True, True, False]
    assert (half.survival[1] > 0).tolist() == [True] * 3 + [False]
    assert planning.recording.steps[0].drafting == 2
