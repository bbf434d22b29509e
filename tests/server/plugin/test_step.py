"""Records of a decode step."""

import json
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from planning import step_of

from outrider.server.plugin.decode.step import RECORDED_STEPS, Admission, Recording, StepDrafts, StepTime


def drafts(verify_lens: list[int]) -> StepDrafts:
    count = len(verify_lens)
    confidence = torch.full((count, 4), 0.5)
    admission = Admission(
        step=step_of(count, 4), classes=torch.zeros(count, dtype=torch.int64), ends=torch.full((count,), 5),
        draft_lens=torch.full((count,), 4), raw=confidence, confidence=confidence,
        verify_lens=torch.tensor(verify_lens), drafting=count, looked_up=None, draft_seconds=0.0, planner_seconds=0.0,
    )  # fmt: skip
    made = StepDrafts(admission, torch.ones(count, dtype=torch.int64))
    made.read()
    return made


def test_records_of_a_step_are_immutable():
    finished = drafts([1])
    assert finished.step is finished.admission.step
    with pytest.raises(FrozenInstanceError):
        finished.admission.verify_lens = torch.zeros(1)
    with pytest.raises(FrozenInstanceError):
        finished.step.planner_seconds = 1.0


def test_a_recording_keeps_the_latest_and_can_be_sent_as_json():
    recording = Recording(gamma=2)
    for number in range(RECORDED_STEPS + 5):
        recording.steps.append(StepTime(number, 2 * number, 3, number % 2, 0.5, 0.25))
    recording.blocks.record(np.array([[0.5, 0.25]]), np.array([2]), np.array([1]), np.array([3]))
    sent = json.loads(json.dumps(recording.to_lists()))
    assert sent["records"] == {"confidence": [[0.5, 0.25]], "verify_lens": [2], "accepted": [1], "classes": [3]}
    steps = sent["steps"]
    assert set(steps) == {"requests", "tokens", "context", "drafting", "seconds", "draft_seconds"}
    assert all(len(column) == RECORDED_STEPS for column in steps.values())
    last = RECORDED_STEPS + 4
    assert [steps[name][-1] for name in ("requests", "tokens", "drafting")] == [last, 2 * last, last % 2 == 1]
    recording.clear()
    empty = recording.to_lists()
    assert not any(empty["steps"].values())
    assert not any(empty["records"].values())
