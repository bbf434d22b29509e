"""Measured points from a log of steps, without an engine."""

from outrider.server.tune.effort import Shape
from outrider.server.tune.measure import _points


def test_drafts_are_grouped_by_the_number_of_drafting_requests():
    drafting = [2, 2, 2, 2, 1, 1, 1, 0, 0, 1, 2]
    seconds = [0.004 if n == 2 else 0.003 if n == 1 else 0.0005 for n in drafting]
    log = {
        "requests": [2] * 10 + [1], "tokens": [6] * 10 + [3], "drafting": drafting, "draft_seconds": seconds,
        "seconds": [0.020 + extra for extra in seconds],
    }  # fmt: skip
    step, *drafts = _points(log, Shape(2, 6, 128), 266.0)
    assert (step.requests, step.tokens, step.context, round(step.median, 6)) == (2, 6, 266.0, 0.02)
    assert {(p.requests, p.context, p.seconds) for p in drafts} == {(2, 266.0, (0.004,)), (1, 133.0, (0.003,))}
    assert all(p.tokens == 0 for p in drafts)


def test_on_a_gpu_a_draft_takes_its_steps_extra_time():
    drafting = [0, 4, 0, 4, 0, 4, 0, 4]
    log = {
        "requests": [3] * 8, "tokens": [6] * 8, "drafting": drafting,
        "draft_seconds": [None if n else 0.0 for n in drafting], "seconds": [0.025 if n else 0.020 for n in drafting],
    }  # fmt: skip
    step, draft = _points(log, Shape(3, 6, 128), 300.0)
    assert (step.requests, step.tokens, step.median) == (3, 6, 0.020)
    assert (draft.requests, draft.tokens, round(draft.median, 6)) == (4, 0, 0.005)
    assert _points(log | {"draft_seconds": [None] * 8}, Shape(3, 6, 128), 300.0) == []


def test_steps_of_another_shape_give_no_point():
    log = {name: [1, 1] for name in ("requests", "tokens", "drafting", "draft_seconds", "seconds")}
    assert _points(log, Shape(2, 6, 128), 266.0) == []
