"""Speculation's counters, and the watch over a drafter that has stopped being any good."""

from __future__ import annotations

import pytest
import torch
from prometheus_client import REGISTRY

from outrider.server.plugin.metrics import SpeculationMetrics


@pytest.fixture(scope="module")
def metrics():
    return SpeculationMetrics(gamma=4, drafter="test")


def value(name, **labels):
    return REGISTRY.get_sample_value(name, {k: str(v) for k, v in labels.items()}) or 0.0


def test_positions_behind_a_rejection_are_unobserved(metrics):
    # accepted all 3; rejected at the 2nd of 4; verified none; rejected at once
    metrics.observe_step(torch.tensor([4, 4, 4, 4]), torch.tensor([3, 4, 0, 1]), torch.tensor([4, 2, 1, 1]))
    assert [value("outrider_verified_position_total", position=k) for k in (1, 2, 3, 4)] == [3, 2, 1, 0]
    assert [value("outrider_accepted_position_total", position=k) for k in (1, 2, 3, 4)] == [2, 1, 1, 0]
    assert value("outrider_drafted_tokens_total") == 16
    assert value("outrider_verified_tokens_total") == 8
    assert value("outrider_accepted_tokens_total") == 4
    assert value("outrider_accepted_length_sum") == 8
    assert value("outrider_accepted_length_count") == 4
    assert value("outrider_decode_steps_total") == 1
    assert value("outrider_request_steps_total") == 4


def test_a_collapsed_drafter_is_told_and_recovers(metrics, caplog):
    four = torch.full((1024,), 4)
    metrics.observe_step(four, four, torch.full((1024,), 3))
    for _ in range(5):
        metrics.observe_step(four, four, torch.ones(1024, dtype=torch.int64))
    assert value("outrider_acceptance_collapsed") == 0  # the window still holds the good start
    for _ in range(5):
        metrics.observe_step(four, four, torch.ones(1024, dtype=torch.int64))
    assert value("outrider_acceptance_collapsed") == 1
    assert "does not fit" in caplog.text
    for _ in range(5):
        metrics.observe_step(four, four, torch.full((1024,), 3))
    assert value("outrider_acceptance_collapsed") == 0
