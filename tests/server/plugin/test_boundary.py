"""Failures of optional parts are counted and logged once; then the part is off."""

import logging
from collections.abc import Callable

import pytest
import torch
from prometheus_client import CollectorRegistry

from outrider.server.plugin.decode.boundary import PARTS, Boundary
from outrider.server.plugin.decode.metrics import SpeculationMetrics


@pytest.fixture
def optional(registry: CollectorRegistry) -> Boundary:
    return Boundary(SpeculationMetrics(3, "dspark", registry).failures)


def fail(message: str) -> int:
    raise ValueError(message)


@pytest.mark.parametrize("part", PARTS)
def test_only_a_part_that_fails_repeatedly_is_switched_off(
    part: str, optional: Boundary, value: Callable[..., float], caplog: pytest.LogCaptureFixture
) -> None:
    assert value("outrider_speculation_failures_total", part=part) == 0  # the series exists before any failure
    assert [optional.run(part, -1, fail, "why\nat length") for _ in range(9)] == [-1] * 9
    most = PARTS[part]
    assert value("outrider_speculation_failures_total", part=part) == optional.counts[part] == (most or 9)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(lines) == max(most, 1)
    assert all(f"{part} failed" in line and "ValueError: why (test_boundary.py:" in line for line in lines)
    assert ("off until the next restart" in lines[-1]) == (most > 0)
    for other in PARTS:
        assert optional.run(other, -1, len, "four") == (-1 if other == part and most else 4)


@pytest.mark.parametrize("error", [torch.AcceleratorError("device-side assert", 710), torch.OutOfMemoryError("4 GiB")])
def test_errors_of_a_device_pass(error: RuntimeError, optional: Boundary, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise error

    with pytest.raises(type(error)):
        optional.run("drafting", None, broken)
    assert "cannot be survived" in caplog.text


def test_without_a_counter_failures_are_raised() -> None:
    with pytest.raises(ValueError, match="why"):
        Boundary().run("drafting", None, fail, "why")
