"""plan_times.py times every planner and refuses empty sizes."""

import argparse
from pathlib import Path

import plan_times as plan
import pytest

from outrider.server.bench import record
from outrider.server.errors import UserError


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("levels", [[], ["--levels"]])
def test_every_planner_is_timed(levels: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    words = ["--requests", "9", "--gamma", "3", "--steps", "10", "--rounds", "2", "--json", str(path), *levels]
    assert plan.run(parse(*words)) == 0
    printed, results = capsys.readouterr().out, record.read(path)["results"]
    assert len(printed.splitlines()) == 1 + len(results)
    for name, stages in results.items():
        assert name in printed
        assert set(stages) == {"budget", "admit", "observe", "total"}
        assert all(len(times) == 2 and min(times) > 0 for times in stages.values())


def test_empty_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="at least 1"):
        plan.run(parse("--requests", "0"))
