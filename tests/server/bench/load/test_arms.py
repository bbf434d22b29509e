"""What `outrider bench load` sums up and shows of the arms on its own engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.server import pictures
from outrider.server.bench.load.arms import Answer, Round, planned_ratio, plot, table


def test_a_round_sums_up_its_answers() -> None:
    fast, slow = Answer(11, 0.5, 1.5, has_level=True), Answer(21, 1.0, 5.0, has_level=True)
    found = Round.of([fast, slow, replace(slow, has_level=False)], 10.0, 9.0)
    assert found.throughput == pytest.approx(5.3)
    assert found.ttft_p50 == 1.0
    assert found.tpot_p50 == pytest.approx(0.2)
    assert found.per_user == pytest.approx(5.0)
    assert found.attained == 0.5  # 10 tokens per second against 9 asked for, and 5
    assert Round.of([fast], 10.0, None).attained is None


def test_planned_is_compared_with_the_better_of_the_others(tmp_path: Path) -> None:
    rounds = [Round(rate, 5.0, 0.1, 0.2, 0.01, 0.02, None) for rate in (10.0, 20.0, 30.0)]
    slower = [replace(r, throughput=r.throughput / 2) for r in rounds]
    faster = [replace(r, throughput=r.throughput * 2, attained=0.75) for r in rounds]
    arms = {"off": slower, "verify all": rounds, "planned": faster, "no levels": slower}
    assert planned_ratio(arms) == (2, 2, 2)
    assert planned_ratio({"planned": faster, "no levels": slower}) is None
    _, off, _, planned, _ = table({8: arms}).splitlines()
    assert off.split()[:3] == ["8", "off", "10.0"]
    assert planned.endswith("75%  2.00 (2.00 to 2.00)")
    with pictures.figure(tmp_path / "load.png") as figure:
        plot({8: arms}, figure)
    assert len(figure.axes[0].lines) == 4
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
