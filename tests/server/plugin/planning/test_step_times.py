"""Times of steps."""

import torch
from planned_steps import GAMMA, admit, begin, finish, logged, on_every_device, prefill, run, state
from planning import curve_cost

from outrider.scheduler.planner import Asynchronous


def test_a_step_lasts_until_the_next_one_begins(make, clock, value):
    planning = make()
    prefill(planning, 2)
    for seconds in (0.25, 0.5, 0.75, 1.0):
        run(planning, 2)
        clock.now += seconds
    assert logged(planning) == [0.25, 0.5, 0.75]
    begin(planning, 2)
    assert logged(planning) == [0.25, 0.5, 0.75, 1.0]
    step = planning.recording.steps[0]
    assert (step.requests, step.tokens, step.context, step.drafting, step.draft_seconds) == (1, 5, 10, 1, 0.125)
    assert value("outrider_step_seconds_count") == len(planning.recording.steps)
    assert planning.planner.cost.drift.plain < 1  # steps took less than the measured second


def test_on_a_gpu_a_step_lasts_from_the_end_of_the_one_before_to_its_own(make, clock):
    """The host's intervals belong to another step."""
    planning = make("cuda", draft_sizes=(2, 4))
    prefill(planning, 2)
    for late, seconds in ((0.125, 0.25), (0.0, 0.5), (0.25, 0.75)):
        admission = admit(planning, begin(planning, 2))
        clock.now += late
        finish(planning, admission, torch.tensor([1]))
        clock.now += seconds - late
    state(planning)
    assert logged(planning) == [0.125, 0.75]
    step = planning.recording.steps[0]
    assert (step.requests, step.tokens, step.context, step.draft_seconds) == (1, 5, 10, None)
    assert step.drafting == 2  # the smallest graph


def test_on_a_gpu_neither_drafts_nor_decisions_of_the_host_are_taken_off(make, clock):
    seen = []
    planning = make("cuda")
    planning.planner.observe = seen.append
    prefill(planning, 2)
    for _ in range(2):
        run(planning, 2)
        clock.now += 1.5
    state(planning)
    assert [(step.seconds, step.draft_seconds, step.host_seconds) for step in seen] == [(None, None, 0), (1.5, None, 0)]


def test_the_cost_model_learns_a_steps_contents(make, clock):
    seconds = [1.0, 1.125, 2.0, 4.0, 8.0]
    planning, reference = make(cost=curve_cost(1, seconds)), curve_cost(1, seconds)
    prefill(planning, 2)
    admission = admit(planning, begin(planning, 2))
    planning.finish(admission, torch.tensor([1]))
    clock.now += 1.5
    begin(planning, 2)
    assert admission.verify_lens.tolist() == [1]
    reference.observe(1, 2, 10.0, 1, 1.5, 0.125)
    assert planning.planner.cost.drift.plain == reference.drift.plain != 1


def test_predicted_times_are_compared_with_those_of_their_steps(make, clock, value):
    planning = make()
    prefill(planning, 2)
    run(planning, 2)
    clock.now += 1.5
    begin(planning, 2)
    assert value("outrider_predicted_step_seconds_total") == 1.0
    assert value("outrider_predictable_step_seconds_total") == 1.5


@on_every_device
def test_a_state_read_between_steps_does_not_lose_the_time_of_the_last_one(make, device, clock):
    planning = make(device)
    prefill(planning, 2)
    run(planning, 2)
    clock.now += 0.25
    state(planning)
    run(planning, 2)
    clock.now += 0.5
    state(planning)
    begin(planning, 2)
    state(planning)
    assert logged(planning) == ([0.25, 0.5] if device == "cpu" else [0.25])


@on_every_device
def test_a_step_that_a_prefill_follows_is_not_timed(make, device, clock, value):
    """On a GPU, the step after it is not timed."""
    planning, seen = make(device), []
    planning.planner.observe = seen.append
    prefill(planning, 2)
    run(planning, 2)
    clock.now += 0.5
    prefill(planning, 3)
    clock.now += 5.0
    run(planning, 2, 3)
    clock.now += 0.25
    run(planning, 2, 3)
    state(planning)
    assert [(step.requests, step.seconds) for step in planning.recording.steps] == [(2, 0.25)]
    assert [step.seconds for step in seen if step.seconds] == [0.25]
    assert value("outrider_decode_steps_total") == 3


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
    run(planning, 2)
    state(planning)
    assert logged(planning) == ([0.25, 1.0] if device == "cpu" else [1.0])


def test_seconds_of_drafting_and_planning_are_counted_once_per_step(make, clock, value):
    class Slow(Asynchronous):
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
    planning.plan_by(Slow(planning.planner.cost, GAMMA, held=1), None)
    prefill(planning, 2)
    run(planning, 2)
    run(planning, 2)
    planning.flush()
    assert value("outrider_planner_seconds_sum") == 122  # learning counts with the next step
    assert value("outrider_planner_seconds_count") == 2
    assert value("outrider_draft_seconds_total") == 0.25
