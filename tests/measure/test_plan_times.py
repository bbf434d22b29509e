"""plan_times.py times every planner."""

from pathlib import Path

import plan_times
import pytest
import script
from records import read_record


@pytest.mark.parametrize("levels", [[], ["--levels"]])
def test_every_planner_is_timed(levels: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    words = ["--requests", "9", "--gamma", "3", "--steps", "10", "--rounds", "2", "--json", str(path), *levels]
    assert script.main(plan_times, words) == 0
    printed, results = capsys.readouterr().out, read_record(path)["results"]
    assert len(printed.splitlines()) == 1 + len(results)
    for name, stages in results.items():
        assert name in printed
        assert set(stages) == {"budget", "admit", "observe", "total"}
        assert all(len(times) == 2 and min(times) > 0 for times in stages.values())
