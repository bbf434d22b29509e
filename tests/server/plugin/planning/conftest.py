"""A clock that tests set, and plannings that count in metrics of their own."""

from __future__ import annotations

import time

import pytest
from planned_steps import GAMMA, PAYS, ROWS
from planning import curve_cost

from outrider.scheduler.planner import Asynchronous
from outrider.server.plugin.decode.metrics import SpeculationMetrics
from outrider.server.plugin.decode.requests import RequestTable
from outrider.server.plugin.decode.step_planner import StepPlanner


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


@pytest.fixture
def metrics(registry):
    return SpeculationMetrics(GAMMA, "test", registry)


@pytest.fixture
def value(metrics, value):
    """Value of a counter, with all that was observed."""

    def read(*args, **labels):
        metrics.flush()
        return value(*args, **labels)

    return read


@pytest.fixture
def make(metrics):
    """make(device, cost, calibration, held, corrects): a StepPlanner with the asynchronous planner whose plans hold for
    one step."""

    def make(device="cpu", cost=None, calibration=None, held=1, corrects=False):
        cost = cost or curve_cost(1, PAYS)
        table = RequestTable(ROWS, GAMMA, "cpu")
        planner = Asynchronous(cost, GAMMA, held=held)
        return StepPlanner(planner, calibration, table, metrics, device, corrects=corrects)

    return make
