"""Tables for SGLang are read by SGLang's own loader; pictures are drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from profile_samples import POINTS

from outrider.profiles.plots import plot_steps_per_second
from outrider.profiles.sglang_table import export
from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.cost.step_times import Point


def test_sglang_loads_our_table_and_looks_up_our_times(tmp_path: Path) -> None:
    from sglang.srt.speculative.dspark_components.dspark_sps import SpsCostTable, load_sps_table_from_path

    cost = StepCost(POINTS)
    export(cost, tmp_path / "sps.json")
    table = load_sps_table_from_path(str(tmp_path / "sps.json"))
    assert isinstance(table, SpsCostTable)
    assert table.sample_batch_tokens == [1, 2, 4, 8, 16, 32]
    assert table.max_batch_tokens == 32
    assert table.lookup(1) == pytest.approx(cost.steps_per_second(1, np.array([1]), 128, drafted=True)[0])
    assert table.lookup(40) == pytest.approx(cost.steps_per_second(4, np.array([32]), 512, drafted=True)[0])
    of_eight = [cost.steps_per_second(r, np.array([8]), 128 * r, drafted=True)[0] for r in (1, 2, 4)]
    assert table.lookup(8) == pytest.approx(np.median(of_eight))


def test_the_curves_are_drawn(tmp_path: Path) -> None:
    for name, points in (("sps.png", POINTS), ("one.png", [Point(1, 1, 0, (1.0,))])):
        figure = pytest.importorskip("matplotlib.figure").Figure()
        plot_steps_per_second(StepCost(points), figure)
        figure.savefig(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
