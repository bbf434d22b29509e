"""Shapes of a measurement in turn, and a killed measurement that goes on."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from profile_samples import HERE

from outrider.profiles.measurement_log import PartialMeasurement
from outrider.scheduler.cost.step_times import Point
from outrider.server.tune.effort import QUICK, Shape
from outrider.server.tune.grid import measure_grid
from outrider.server.tune.idle import run_now

SHAPES = [Shape(2, 8, 128), Shape(2, 16, 128)]


class Killed(Exception):
    pass


def test_a_measurement_goes_on_with_the_shapes_that_are_missing(tmp_path: Path) -> None:
    """Points may have more tokens than their shape: rounds of one state also hold the blocks before."""
    measured: list[Shape] = []

    async def measure(manager: Any, shape: Shape, steps: int) -> list[Point]:
        if len(measured) == 4:
            raise Killed
        measured.append(shape)
        return [Point(shape.requests, 16, shape.total_context(steps), (0.01,))]

    def run() -> list[Point]:
        partial, effort = PartialMeasurement(tmp_path / "log", HERE), replace(QUICK, rounds=2)
        return asyncio.run(measure_grid(None, SHAPES, measure, effort, partial, lambda *_: None, run_now))

    with pytest.raises(Killed):
        run()
    warm, *before = measured
    measured.clear()
    assert len(run()) == 4
    assert [warm, *before, *measured] == [SHAPES[0], *SHAPES, SHAPES[0], SHAPES[0], SHAPES[1]]
