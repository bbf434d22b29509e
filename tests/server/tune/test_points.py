"""Measured points from a log of steps, without an engine."""

from __future__ import annotations

from outrider.server.tune.effort import Shape
from outrider.server.tune.measure import _points


def test_drafts_are_told_apart_by_the_number_for_which_the_model_drafted():
    drafting = [2, 2, 2, 2, 1, 1, 1, 0, 0, 1, 2]
    seconds = [0.004 if n == 2 else 0.003 if n == 1 else 0.0005 for n in drafting]
    log = {
        "requests": [2] * 10 + [1],
        "tokens": [6] * 10 + [3],
        "drafting": drafting,
        "draft_seconds": seconds,
        "seconds": [0.020 + extra for extra in seconds],
    }
    step, *drafts = _points(log, Shape(2, 6, 128), 266.0)
    assert (step.requests, step.tokens, step.context, round(step.median, 6)) == (2, 6, 266.0, 0.02)
    assert {(p.requests, p.context, p.seconds) for p in drafts} == {(2, 266.0, (0.004,)), (1, 133.0, (0.003,))}
    assert all(p.tokens == 0 for p in drafts)


def test_nothing_comes_of_steps_of_another_shape():
    log = {name: [1, 1] for name in ("requests", "tokens", "drafting", "draft_seconds", "seconds")}
    assert _points(log, Shape(2, 6, 128), 266.0) == []
