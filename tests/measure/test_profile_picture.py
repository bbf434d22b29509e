"""Pictures of step times are drawn."""

from pathlib import Path

import pytest
from profile_picture import plot_steps_per_second
from profile_samples import POINTS

from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.cost.step_times import Point


def test_the_curves_are_drawn(tmp_path: Path) -> None:
    for name, points in (("sps.png", POINTS), ("one.png", [Point(1, 1, 0, (1.0,))])):
        figure = pytest.importorskip("matplotlib.figure").Figure()
        plot_steps_per_second(StepCost(points), figure)
        figure.savefig(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
