"""The planner's input and decisions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from planned_steps import (
    GAMMA,
    HALVED,
    PAYS,
    admit,
    arrive,
    begin,
    finish,
    logged,
    on_every_device,
    prefill,
    run,
    state,
)
from planning import curve_cost

from outrider.drafters.base import Draft
from outrider.scheduler.baselines import Synchronous
from outrider.scheduler.contract import Budget, Planner
from outrider.scheduler.planner import Asynchronous
from outrider.server.plugin.config import PluginConfig
from outrider.server.plugin.decode.worker import SpeculativeWorker


@on_every_device
def test_steps_under_way_are_shown_to_the_planner_that_planned_them(make, device, clock):
    planning = make(device)
    prefill(planning, 2)
    run(planning, 2, confidence=0.5)
    clock.now += 0.25
    run(planning, 2, accepted=4)
    before, cost = planning.planner, planning.planner.cost
    newer = curve_cost(1, PAYS)
    planning.plan_by(Asynchronous(newer, GAMMA, held=1), HALVED)
    arrive(planning)
    planning.flush()
    drift = cost.drift.plain
    assert drift != 1
    assert planning.requests.generated[2] == 5
    run(planning, 2)
    clock.now += 0.25
    for _ in range(2):
        run(planning, 2)
    begin(planning, 2)  # on a GPU this reads the new planner's first timed step
    assert newer.drift.plain != 1
    assert cost.drift.plain == drift
    before.budget(begin(planning, 2).view)
    assert before.history.counts(np.array([2]), planning.requests.generations[[2]]).all()


@on_every_device
def test_the_step_before_another_plan_is_not_timed(make, device, clock):
    planning = make(device)
    prefill(planning, 2)
    run(planning, 2)
    newer = curve_cost(1, PAYS)
    planning.plan_by(Asynchronous(newer, GAMMA, held=1), None)
    clock.now += 5.0
    begin(planning, 2)
    planning.state()
    assert logged(planning) == []
    assert newer.drift.plain == 1


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
        planning.plan_by(Synchronous(dear), calibration)
        admitted += admit(planning, begin(planning, 2), confidence=0.9).verify_lens.tolist()
    assert admitted == [1, 0]  # 1.9 tokens in 1.8 s, or 1.75, or one in a second


def test_every_draft_of_an_unplanned_request_is_verified_though_drafting_does_not_pay(make):
    planning = make(cost=curve_cost(2, [1.0] + [100.0] * (2 * GAMMA), draft=0.5))
    prefill(planning, 2)
    prefill(planning, 5, planned=False)
    step = begin(planning, 2, 5)
    assert not step.budget.draft
    assert step.drafts
    assert admit(planning, step, lens=3).verify_lens.tolist() == [0, 3]


def test_a_planner_that_does_not_draft_admits_no_planned_drafts(make):
    class Never(Planner):
        def budget(self, step):
            return Budget(draft=False, tokens=None)

        def admit(self, confidence, draft_lens, budget):
            return draft_lens

    planning = make()
    planning.plan_by(Never(), None)
    prefill(planning, 2)
    prefill(planning, 5, planned=False)
    assert admit(planning, begin(planning, 2, 5)).verify_lens.tolist() == [0, GAMMA]
    assert admit(planning, begin(planning, 2)).verify_lens.tolist() == [0]


@pytest.mark.parametrize("rows", [(2, 5), (5, 2)])
def test_unplanned_requests_do_not_use_the_budget(make, rows):
    planning = make(cost=curve_cost(2, [1.0] * 3 + [100.0] * (2 * GAMMA - 2)))
    prefill(planning, 2)
    prefill(planning, 5, planned=False)
    step = begin(planning, *rows)
    assert step.budget.tokens == 2
    assert dict(zip(rows, admit(planning, step).verify_lens.tolist(), strict=True)) == {2: 2, 5: GAMMA}


def test_a_step_in_which_no_request_may_draft_does_not_draft(make, value):
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


class Hearing(Planner):
    """Drafts for all, verifies whole drafts, and records its input."""

    def budget(self, step):
        return Budget(draft=True, tokens=None)

    def admit(self, confidence, draft_lens, budget):
        return draft_lens

    def observe(self, step):
        self.draft_mask, self.looked_up = step.draft_mask.tolist(), step.looked_up.tolist()
        self.survival, self.drafting = step.survival, step.drafting


@on_every_device
def test_the_planner_observes_the_source_of_each_draft(make, device, clock):
    planning = make(device)
    hearing = Hearing()
    planning.plan_by(hearing, None)
    prefill(planning, 2, 5)
    prefill(planning, 3, enabled=False)
    prefill(planning, 6, planned=False)
    step = begin(planning, 2, 5, 3, 6)
    assert step.draft_mask.tolist() == [True, True, False, True]
    draft = Draft(
        torch.zeros(4, GAMMA, dtype=torch.int64), torch.tensor([GAMMA, 3, 0, GAMMA]), torch.full((4, GAMMA), 0.5),
        looked_up=torch.tensor([False, True, True, False]), drafting=2,
    )  # fmt: skip
    admission = planning.admit(step, draft, 0.125)
    assert admission.verify_lens.tolist() == [GAMMA, 3, 0, GAMMA]
    finish(planning, admission, torch.ones(4, dtype=torch.int64))
    clock.now += 0.5
    begin(planning, 2)
    state(planning)
    assert hearing.draft_mask == [True, True, False, True]
    assert hearing.looked_up == [False, True, True, False]
    assert hearing.drafting == 2
    assert (hearing.survival[1] > 0).tolist() == [True] * 3 + [False]
    timed = [2] if device == "cpu" else []  # on a GPU the first step is not timed
    assert [step.drafting for step in planning.recording.steps] == timed


def test_a_damaged_profile_keeps_the_plan(make, tmp_path):
    """A drafter may be promoted at any time, and the engine must continue."""
    (tmp_path / "profile.json").write_text("{")
    planning, config = make(), PluginConfig(drafter="dspark", profile=str(tmp_path))
    planner = planning.planner
    exchange = SimpleNamespace(in_use="")
    worker = SimpleNamespace(planning=planning, config=config, exchange=exchange, optional=planning.optional)
    SpeculativeWorker.reload_profile(worker)
    assert planning.planner is planner
