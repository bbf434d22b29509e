"""When the outcome of a step is read."""

import numpy as np
import torch
from planned_steps import GAMMA, HALVED, admit, arrive, begin, finish, on_every_device, prefill, run, state


def test_on_the_host_an_outcome_is_read_when_the_planner_looks_back(make, value):
    planning = make()
    prefill(planning, 2)
    run(planning, 2, accepted=3)
    assert value("outrider_decode_steps_total") == 0
    begin(planning, 2)
    assert planning.requests.generated[2] == 3
    assert value("outrider_decode_steps_total") == 1
    assert len(planning.recording.blocks) == 1


def test_outcomes_wait_while_a_plan_holds_and_none_is_lost(make, clock, value):
    planning, prompt = make(held=3), make()
    for each in (planning, prompt):
        prefill(each, 2)
    read = []
    for _ in range(7):
        for each in (planning, prompt):
            run(each, 2, accepted=3)
        clock.now += 0.5
        read.append(int(planning.requests.generated[2]) // 3)
    assert read == [0, 0, 0, 3, 3, 3, 6]
    for each in (planning, prompt):
        each.flush()
    assert planning.requests.generated[2] == prompt.requests.generated[2] == 21
    assert planning.state() == prompt.state()
    assert value("outrider_decode_steps_total") == 14
    assert planning.planner.cost.drift.plain == prompt.planner.cost.drift.plain != 1


def test_outcomes_do_not_wait_with_a_service_level(make):
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
    run(planning, 2, accepted=3)
    run(planning, 2, accepted=2)
    assert planning.requests.generated[2] == 0
    assert value("outrider_decode_steps_total") == 0
    clock.now += 2.0
    step = begin(planning, 2)
    assert planning.requests.generated[2] == 3
    assert step.view.progress == 1.5  # tokens per second, which the planner may know
    assert value("outrider_decode_steps_total") == 1
    finish(planning, admit(planning, step), torch.tensor([1]))
    assert planning.requests.generated[2] == 3
    begin(planning, 2)
    assert planning.requests.generated[2] == 5


def test_a_gpu_that_is_late_is_not_waited_for(make, value):
    planning = make("cuda")
    prefill(planning, 2)
    late = [planning.finish(admit(planning, begin(planning, 2)), torch.tensor([3])) for _ in range(40)]
    planning.state()
    assert planning.requests.generated[2] == 0
    for outcome in late:
        outcome.copy_to_host(torch.clone).consume(None, [])
    begin(planning, 2)
    assert planning.requests.generated[2] == 120
    assert value("outrider_decode_steps_total") == 40


def test_the_outcome_of_a_step_without_drafts_is_not_copied_from_a_gpu(make, value):
    planning = make("cuda")
    prefill(planning, 2, 5, enabled=False)
    for _ in range(3):
        run(planning, 2, 5)
        assert not planning.under_way.tensors
    state(planning)
    assert planning.requests.generated[[2, 5]].tolist() == [3, 3]
    assert value("outrider_decode_steps_total") == 3
    assert len(planning.recording.blocks) == 0


@on_every_device
def test_the_planner_learns_of_a_step_when_the_step_after_the_next_is_planned(make, device):
    planning = make(device)
    prefill(planning, 2)
    history = planning.planner.history

    request = np.array([2]), planning.requests.generations[[2]]
    run(planning, 2, confidence=0.5)
    run(planning, 2, confidence=0.9)
    assert not history.counts(*request).any()
    begin(planning, 2)
    assert history.counts(*request).all()
    survival, _ = history.read(*request, 1)
    np.testing.assert_allclose(survival[0, 0], 0.5 ** np.arange(1, GAMMA + 1))


@on_every_device
def test_a_state_read_between_steps_includes_the_last_one(make, device):
    planning = make(device)
    prefill(planning, 2)
    run(planning, 2, accepted=3, confidence=0.75)
    assert state(planning)["records"] == {
        "confidence": [[0.75] * GAMMA], "verify_lens": [GAMMA], "accepted": [2], "classes": [0],
    }  # fmt: skip


@on_every_device
def test_forgotten_steps_do_not_come_back(make, device):
    planning = make(device)
    prefill(planning, 2)
    for _ in range(3):
        run(planning, 2)
    arrive(planning)
    planning.forget()
    prefill(planning, 2)
    found = planning.state()
    assert not any(found["steps"].values())
    assert not any(found["records"].values())
    run(planning, 2)
    run(planning, 2)
    found = state(planning)
    assert len(found["steps"]["seconds"]) == 1
    assert len(found["records"]["accepted"]) == 2


@on_every_device
def test_outcomes_correct_the_confidences_of_later_steps_alone(make, device):
    corrected, as_it_is = make(device, calibration=HALVED, corrects=True), make(device, calibration=HALVED)
    seen = []
    for planning in (corrected, as_it_is):
        prefill(planning, 2, 5)
        seen.append([])
        for _ in range(200):
            admission = admit(planning, begin(planning, 2, 5))
            seen[-1].append(float(admission.confidence[0, 0]))
            finish(planning, admission, torch.tensor([1, 1]))
    assert seen[0][:32] == seen[1][:32] == [seen[1][0]] * 32  # the correction is updated every 64 drafts
    assert seen[0][-1] < 0.5 * seen[0][0]
    assert seen[1][-1] == seen[1][0]


def test_tokens_of_a_rows_former_request_do_not_count_for_the_new_one(make):
    planning = make("cuda")
    prefill(planning, 2, 5)
    run(planning, 2, 5, accepted=4)
    prefill(planning, 2)
    run(planning, 2, 5, accepted=1)
    begin(planning, 2, 5)
    assert planning.requests.generated[[2, 5]].tolist() == [0, 4]
    state(planning)
    assert planning.requests.generated[[2, 5]].tolist() == [1, 5]
