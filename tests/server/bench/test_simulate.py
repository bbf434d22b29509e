"""The output and refusals of `outrider simulate`."""

import json
import re
import statistics
from pathlib import Path

import ablation
import numpy as np
import pytest
import script
from ablation import PLANNERS, SITUATIONS, WITHOUT, change
from profile_samples import profile
from records import read_record

from outrider.profiles import store
from outrider.scheduler.planner import Asynchronous
from outrider.server.bench.replay import Positions
from outrider.server.bench.simulated import make_planner
from outrider.server.cli.main import main

QUICK = ["simulate", "--concurrency", "1,16", "--steps", "60", "--output", "30", "--resamples", "2"]


def test_it_compares_planners(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--json", str(tmp_path / "rows.json")]) == 0
    names = ["verify-all", "threshold", "synchronous", "asynchronous"]
    table = capsys.readouterr().out.splitlines()
    rows = read_record(tmp_path / "rows.json")["results"]
    assert [(row["requests"], row["planner"]) for row in rows] == [(size, name) for size in (1, 16) for name in names]
    assert table[0].split() == ["machine", "requests", *names]
    for line, start in zip(table[1:], (0, 4), strict=True):
        shown = [float(middle) for middle in re.findall(r"(\d\.\d{3}) \(", line)]
        assert shown == [round(statistics.median(row["ratios"]), 3) for row in rows[start : start + 4]]
        assert min(shown) > 1


def test_a_decision_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "decision.png"
    assert main([*QUICK, "--planners", "asynchronous", "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_costs_of_a_profile_and_counts_of_the_benchmark(tmp_path: Path) -> None:
    store.save(profile(), tmp_path, None)
    counts = tmp_path / "accept.json"
    counts.write_text(
        json.dumps({"a": {"tried": [90, 50, 0], "kept": [40, 20, 0]}, "b": {"tried": [10, 0, 0], "kept": [10, 0, 0]}})
    )
    words = ["--profile", str(tmp_path / "epyc"), "--acceptance", str(counts), "--planners", "verify-all"]
    words += ["--concurrency", "2", "--prompt", "10", "--steps", "1000", "--output", "300"]
    assert main([*QUICK, *words, "--json", str(tmp_path / "rows.json")]) == 0
    [row] = read_record(tmp_path / "rows.json")["results"]
    cost, context = profile().cost(), 2 * (10 + 150)
    plain, verified = cost.seconds(2, np.array([2, 6]), context)  # the third position was never verified
    expected = (1 + 0.5 + 0.5 * 0.4) * plain / (verified + cost.draft_seconds(2))
    assert statistics.mean(row["ratios"]) == pytest.approx(expected, rel=0.06)


def test_it_ablates_every_mechanism_in_every_situation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store.save(profile(), tmp_path, None)
    Positions.made_up([0.9, 0.8, 0.8], 20, 30).save(tmp_path / "made.npz")
    words = ["--recorded", str(tmp_path / "made.npz"), "--profile", str(tmp_path / "epyc")]
    words += ["--concurrency", "2", "--steps", "20", "--resamples", "1", "--json", str(tmp_path / "ablation.json")]
    assert script.main(ablation, words) == 0
    results = read_record(tmp_path / "ablation.json")["results"]
    assert set(results) == set(SITUATIONS)
    assert all(set(arms) == {*PLANNERS, *WITHOUT} for arms in results.values())
    table = capsys.readouterr().out
    assert all(table.count(f"  {arm} ") == len(SITUATIONS) for arm in (*PLANNERS, *WITHOUT))
    assert results["hopeless"]["off"]["epyc 2"][0] > results["hopeless"]["verify-all"]["epyc 2"][0]


def test_an_ablated_planner_decides_differently() -> None:
    planner = make_planner("asynchronous", 3, profile().cost())
    assert isinstance(planner, Asynchronous)
    WITHOUT["held plans"](planner)
    assert planner.held == 1
    with pytest.raises(AttributeError, match="no_such_part"):
        change("history.no_such_part", None)(planner)
