"""host_times.py times steps of this checkout and another, and refuses a folder that is none."""

from pathlib import Path

import host_times
import pytest
import script
from records import read_record


@pytest.mark.slow
def test_every_case_is_timed_here_and_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "host.json"
    words = ["--steps", "3", "--rounds", "1", "--against", str(host_times.ROOT), "--json", str(path)]
    assert script.main(host_times, words) == 0
    printed, results = capsys.readouterr().out, read_record(path)["results"]
    assert len(results) == 12
    for case, found in results.items():
        assert case in printed
        assert set(found) == {"here", "there"}
        assert all(len(times) == 1 and min(times) > 0 for times in found.values())


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(host_times, ["--against", str(tmp_path)]) == 1
    assert "is no checkout" in capsys.readouterr().err
