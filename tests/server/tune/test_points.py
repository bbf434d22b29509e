"""Measured points and records of drafts from a log of steps, without an engine."""

from types import SimpleNamespace

import pytest

from outrider.scheduler.calibration.fit import fit_table
from outrider.server.tune.effort import Shape
from outrider.server.tune.measure import NO_RECORDS, _points, to_records
from outrider.server.tune.report import Tuned


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


def test_only_the_models_gamma_tokens_of_longer_drafts_are_fitted() -> None:
    lists = {
        "confidence": [[0.9, 0.8, 0.7, 0.6], [0.5, 0.4, 0.3, 0.2]],
        "verify_lens": [4, 1],
        "accepted": [3, 0],
        "classes": [1, 0],
    }
    records = to_records(lists, 2)
    assert records.confidence.tolist() == [pytest.approx([0.9, 0.8]), pytest.approx([0.5, 0.4])]
    assert records.verify_lens.tolist() == [2, 1]
    assert records.accepted.tolist() == [2, 0]
    assert to_records(NO_RECORDS, 2).confidence.shape == (0, 2)


def test_a_measurement_without_any_drafts_is_summed_up() -> None:
    nothing = to_records(NO_RECORDS, 2)
    profile = SimpleNamespace(points=(1, 2, 3))
    summary = Tuned(profile, fit_table(nothing, nothing, dataset="none"), nothing).summary
    assert summary.startswith("3 step times; no drafts")
