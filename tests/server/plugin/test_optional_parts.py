"""Optional parts follow requests and steps; a failing one changes nothing for the rest."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from outrider.scheduler.calibration.classes import CLASSES
from outrider.scheduler.calibration.model import Calibration
from outrider.scheduler.calibration.table import CalibrationTable
from outrider.server.plugin.decode.boundary import Boundary
from outrider.server.plugin.decode.metrics import SpeculationMetrics
from outrider.server.plugin.decode.optional.part import OptionalPart, OptionalParts
from outrider.server.plugin.decode.requests import RequestTable

GAMMA = 2


class Request(SimpleNamespace):
    __slots__ = ("__weakref__",)


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
        return table(float(number)) if number > 1 else None


def table(shift: float) -> CalibrationTable:
    return CalibrationTable.of({name: Calibration((1.0,) * GAMMA, (shift,) * GAMMA) for name in CLASSES}, GAMMA)


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
    common = table(0.5)
    shifts = [each.by_class[0].shifts[0] for each in parts.tables(requests.entries(np.arange(4)), common, GAMMA) or []]
    assert shifts == [0.5, 5.0, 7.0, 0.5]
    assert parts.tables(requests.entries(np.array([0])), common, GAMMA) is None
