"""Optional parts follow requests and steps; failures are counted and logged, and change nothing for the rest."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from planning import Request, shifted
from prometheus_client import CollectorRegistry

from outrider.scheduler.calibration.table import CalibrationTable
from outrider.server.plugin.decode.boundary import PARTS, Boundary
from outrider.server.plugin.decode.metrics import SpeculationMetrics
from outrider.server.plugin.decode.optional.part import OptionalPart, OptionalParts
from outrider.server.plugin.decode.requests import RequestTable

GAMMA = 2


class Numbering(OptionalPart):
    """Numbers requests by their names, and records its calls."""

    def __init__(self, part: str, column: str, fails: str = "") -> None:
        self.part, self.column, self.fails, self.calls = part, column, fails, list[Any]()  # type: ignore[misc]

    def _called(self, name: str, *given: Any) -> None:
        self.calls.append((name, *given))
        if name == self.fails:
            raise ValueError(name)

    def admitted(self, req: Any) -> int:
        self._called("admitted", req.rid)
        return int(req.rid)

    def sent(self, result: Any, numbers: np.ndarray, admission: Any, accept_lens: Any) -> None:
        self._called("sent", result, numbers.tolist())

    def finished(self, req: Any) -> None:
        self._called("finished", req.rid)

    def table(self, number: int) -> CalibrationTable | None:
        return shifted(float(number), GAMMA) if number > 1 else None


def run(registry: CollectorRegistry, *parts: OptionalPart) -> tuple[Boundary, RequestTable, OptionalParts]:
    """Admit requests 1, 2 and 3, the second twice, and end the first two."""
    optional = Boundary(SpeculationMetrics(GAMMA, "test", registry).failures)
    requests, called = RequestTable(4, GAMMA, "cpu"), OptionalParts(optional, parts)
    reqs = [Request(rid=rid) for rid in ("1", "2", "3")]
    called.admitted(requests, [0, 1, 2], reqs)
    called.admitted(requests, [3], reqs[1:2])
    called.sent("result", requests, np.array([3, 0]), None, None)
    for rid in ("2", "1", "1", "unknown"):
        called.finished(rid)
    return optional, requests, called


CALLS = [("admitted", rid) for rid in "1232"] + [("sent", "result", [2, 1]), ("finished", "2"), ("finished", "1")]


def test_parts_follow_requests_from_prefill_to_end(registry: CollectorRegistry) -> None:
    part, idle = Numbering("lookups", "corpora"), OptionalPart()  # a part need not define any method
    _, requests, _ = run(registry, part, idle)
    assert part.calls == CALLS
    assert requests.numbers["corpora"].tolist() == [1, 2, 3, 2]
    assert not requests.numbers["sets"].any()


@pytest.mark.parametrize("method", ["admitted", "sent", "finished"])
def test_a_part_that_fails_leaves_the_rest_alone(registry: CollectorRegistry, method: str) -> None:
    failing, part = Numbering("adapters", "adapters", fails=method), Numbering("lookups", "corpora")
    optional, requests, _ = run(registry, failing, part)
    assert part.calls == CALLS
    assert optional.counts["adapters"] == min(3, sum(call[0] == method for call in CALLS))
    assert requests.numbers["adapters"].tolist() == ([0] * 4 if method == "admitted" else [1, 2, 3, 2])
    assert requests.numbers["corpora"].tolist() == [1, 2, 3, 2]


def test_a_request_has_the_calibration_of_the_last_part_that_has_one(registry: CollectorRegistry) -> None:
    _, requests, parts = run(registry, Numbering("own_drafters", "sets"), Numbering("adapters", "adapters"))
    requests.numbers["sets"][:], requests.numbers["adapters"][:] = [0, 5, 5, 1], [0, 0, 7, 1]
    common = shifted(0.5, GAMMA)
    shifts = [each.by_class[0].shifts[0] for each in parts.tables(requests.entries(np.arange(4)), common, GAMMA) or []]
    assert shifts == [0.5, 5.0, 7.0, 0.5]
    assert parts.tables(requests.entries(np.array([0])), common, GAMMA) is None


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
    assert all(f"{part} failed" in line and "ValueError: why (test_optional_parts.py:" in line for line in lines)
    assert ("off until the next restart" in lines[-1]) == (most > 0)
    for each in PARTS:
        assert optional.run(each, -1, len, "four") == (-1 if each == part and most else 4)


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
