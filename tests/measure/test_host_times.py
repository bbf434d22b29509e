"""host_times.py times steps of this checkout and another, and refuses a folder that is none."""

import argparse
from pathlib import Path

import host_times
import pytest

from outrider.server.bench import record
from outrider.server.errors import UserError


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    host_times.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.slow
def test_every_case_is_timed_here_and_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "host.json"
    words = "--steps", "3", "--rounds", "1", "--against", str(host_times.ROOT), "--json", str(path)
    assert host_times.run(parse(*words)) == 0
    printed, results = capsys.readouterr().out, record.read(path)["results"]
    assert len(results) == 12
    for case, found in results.items():
        assert case in printed
        assert set(found) == {"here", "there"}
        assert all(len(times) == 1 and min(times) > 0 for times in found.values())


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkout"):
        host_times.run(parse("--against", str(tmp_path)))


def test_empty_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="at least 1"):
        host_times.run(parse("--steps", "0"))
