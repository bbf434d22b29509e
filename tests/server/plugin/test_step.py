"""Records of a decode step."""

import json

import numpy as np

from outrider.server.plugin.decode.step import RECORDED_STEPS, Recording, StepTime


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
