"""A clock that tests set, and plannings with separate metrics."""

import time

import pytest
import torch
from planned_steps import GAMMA, PAYS, ROWS
from planning import curve_cost

from outrider.scheduler.planner import Asynchronous
from outrider.server.plugin.decode.metrics import SpeculationMetrics
from outrider.server.plugin.decode.plan import StepPlanner
from outrider.server.plugin.decode.requests import RequestTable


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The clocks of the host and of a device that finishes its work at once."""
    clock = Clock()

    class Event(torch.cpu.Event):
        def __init__(self, enable_timing=False):
            self.enable_timing = enable_timing

        def record(self, stream=None):
            self.at = clock.now

        def elapsed_time(self, end):
            assert self.enable_timing
            assert end.enable_timing
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(torch.cpu, "Event", Event)
    return clock


@pytest.fixture
def metrics(registry):
    return SpeculationMetrics(GAMMA, "test", registry)


@pytest.fixture
def value(metrics, value):
    def read(*args, **labels):
        metrics.flush()
        return value(*args, **labels)

    return read


@pytest.fixture
def make(metrics):
    """A StepPlanner with the asynchronous planner; its plans hold for one step."""

    def make(device="cpu", cost=None, calibration=None, held=1, corrects=False, draft_sizes=()):
        cost = cost or curve_cost(1, PAYS)
        table = RequestTable(ROWS, GAMMA, "cpu")
        planner = Asynchronous(cost, GAMMA, held=held)
        return StepPlanner(planner, calibration, table, metrics, device, corrects=corrects, draft_sizes=draft_sizes)

    return make
