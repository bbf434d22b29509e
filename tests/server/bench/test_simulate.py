"""`outrider simulate` prints, draws and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from profile_samples import profile

from outrider.profiles import store
from outrider.server.bench import record
from outrider.server.cli.main import main

QUICK = ["simulate", "--concurrency", "1,16", "--steps", "60", "--output", "30"]


def test_it_compares_planners(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "plot.png")]) == 0
    table = capsys.readouterr().out.splitlines()
    rows = record.read(tmp_path / "rows.json")["results"]
    assert [(row["requests"], row["planner"]) for row in rows] == [
        (size, name) for size in (1, 16) for name in ("off", "verify-all", "threshold", "synchronous", "asynchronous")
    ]
    assert table[0].split()[:3] == ["requests", "planner", "tok/s"]
    for line, row in zip(table[1:], rows, strict=True):
        assert line.split()[1] == row["planner"]
        assert int(line.split()[2]) == round(row["throughput"])
        assert row["attainment"] is None  # nobody asked for a level
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arrivals", ["poisson", "bursty"])
def test_a_load_that_a_plain_server_can_just_bear(arrivals: str, tmp_path: Path) -> None:
    """Half of it is answered as it comes, twice of it is not."""
    found = {}
    for load in ("0.5", "2"):
        words = ["--arrivals", arrivals, "--load", load, "--planners", "off", "--level", "1", "--level-share", "1"]
        assert main([*QUICK, "--steps", "400", *words, "--json", str(tmp_path / "rows.json")]) == 0
        found[load] = record.read(tmp_path / "rows.json")["results"][1]
    assert found["2"]["wait_mean"] > 3 * found["0.5"]["wait_mean"]
    assert found["2"]["throughput"] > 1.2 * found["0.5"]["throughput"]
    assert found["2"]["attainment"] == 1


def test_costs_of_a_profile_and_counts_of_the_benchmark(tmp_path: Path) -> None:
    store.save(profile(), tmp_path, None)
    counts = tmp_path / "accept.json"
    counts.write_text(
        json.dumps({"a": {"tried": [90, 50, 0], "kept": [40, 20, 0]}, "b": {"tried": [10, 0, 0], "kept": [10, 0, 0]}})
    )
    words = [
        "--profile",
        str(tmp_path / "epyc"),
        "--acceptance",
        str(counts),
        "--planners",
        "verify-all",
        "--noise",
        "0",
    ]
    words += ["--concurrency", "2", "--prompt", "10", "--steps", "4000", "--prefill", "0"]
    assert main([*QUICK, *words, "--json", str(tmp_path / "rows.json")]) == 0
    [row] = record.read(tmp_path / "rows.json")["results"]
    assert row["verified_per_request"] == 3  # the third position was never tried
    assert row["accepted_length"] == pytest.approx(1 + 0.5 + 0.5 * 0.4, rel=0.05)
    step = 10.5e-3 + 6e-3 + (2e-3 + 1e-3 / 3)  # at 2 requests: 6 tokens, then drafting
    assert row["throughput"] == pytest.approx(2 * row["accepted_length"] / step, rel=0.06)


def test_help_names_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["simulate", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    from outrider.server.bench.simulate import COLUMNS

    assert all(re.search(rf"(^|\W){re.escape(name)}(\W|$)", text) for name in COLUMNS)
    assert "examples:" in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--concurrency", "some"], "a list of positive numbers like 1,8"),
        (["--concurrency", "0"], "a list of positive numbers like 1,8"),
        (["--concurrency", "100001"], "from 1 to"),
        (["--planners", "best"], "knows off, verify-all"),
        (["--planners", "threshold=2"], "survival in 0..1"),
        (["--cost", "weight=3"], "--cost knows base"),
        (["--cost", "base=fast"], "number of milliseconds"),
        (["--cost", "base=-1"], "base is 0 or more"),
        (["--acceptance", "0.8,high"], "a list like"),
        (["--acceptance", "1.5"], "0..1 per position"),
        (["--profile", "nowhere"], "no profile nowhere"),
        (["--steps", "1"], "at least 10"),
        (["--arrivals", "poisson", "--load", "0"], "above 0"),
    ],
)
def test_bad_input_is_one_line(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, *words]) == 1
    error = capsys.readouterr().err
    assert reason in error
    assert error.startswith("outrider: ")
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[1]", "not from `outrider bench load"),
        ("no JSON", "not from `outrider bench load"),
        ('{"a": {"tried": [0], "kept": [0]}}', "counts no tokens"),
    ],
)
def test_a_file_that_holds_no_counts_is_refused(
    tmp_path: Path, content: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text(content)
    assert main([*QUICK, "--acceptance", str(tmp_path / "file")]) == 1
    assert reason in capsys.readouterr().err
