"""`outrider gpu-check` without a GPU: its steps through Triton's interpreter, and how it keeps, resumes and judges."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outrider.server.cli.main import main
from outrider.server.errors import UserError
from outrider.server.gpu_check import cli, parts
from outrider.server.gpu_check.device import Device
from outrider.server.gpu_check.report import Measured, Report

PART_A = """
import sys

sys.modules["sglang"] = None
from outrider.server.cli.main import main

flags = ["--device", "cpu", "--out", sys.argv[1]]
code = main(["gpu-check", "A", *flags])
from outrider.kernels.cuda import ragged

flatten = ragged.flatten
ragged.flatten = lambda *given: [x.roll(1) for x in flatten(*given)]
wrong = main(["gpu-check", "A:lengths", *flags])
ragged.flatten = flatten
from outrider.server.plugin.decode.verify_tail import VerifyTail

VerifyTail.close = lambda tail: None
print(code, wrong, main(["gpu-check", "A:tail", *flags]))
"""


def test_every_step_of_part_a_through_the_interpreter_and_a_fault_is_noticed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PART_A, str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.stdout.splitlines()[-1] == "0 1 1", run.stdout[-3000:] + run.stderr[-2000:]
    report = json.loads((tmp_path / "A.json").read_text())
    assert list(report["steps"]) == list(parts.PARTS["A"].steps)
    assert all(step["measured"] and not step["error"] for step in report["steps"].values())
    faults = [one["what"] for one in report["steps"]["lengths"]["measured"] if one["good"] is False]
    assert faults
    assert all(what.startswith("flattened") or what.startswith("committed") for what in faults)


class Here(Device):
    """A device of the host, which can be lost."""

    on, tiny, types = torch.device("cpu"), True, (torch.float32,)
    name, lost = "here", False

    def about(self):
        return {"device": self.name}

    def synchronise(self) -> None:
        if self.lost:
            raise RuntimeError("illegal memory access\nand more")

    graph = seconds = launch_seconds = nobody_waits = triton = pool = release = used = None  # type: ignore[assignment]


def good(device: Here) -> Iterator[Measured]:
    yield Measured("three", 3.0, "ms", at_most=4)


def bad(device: Here) -> Iterator[Measured]:
    yield Measured("three", 3.0, "ms", at_least=4)


def broken(device: Here) -> Iterator[Measured]:
    yield Measured("one", 1.0, "")
    raise ValueError("no | such thing\nhere")


def losing(device: Here) -> Iterator[Measured]:
    device.lost = True
    yield Measured("one", 1.0, "")


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Part A has these steps, on a device of the host."""
    monkeypatch.setattr(cli.devices, "make", lambda name, tiny: Here())
    steps = {check.__name__: check for check in (good, broken, bad, losing)}
    monkeypatch.setitem(parts.PARTS, "A", dataclasses.replace(parts.PARTS["A"], steps=dict.fromkeys(steps, "")))
    monkeypatch.setattr(parts, "check", lambda letter, step: steps[step])


def ran(folder: Path, *given: str) -> int:
    return main(["gpu-check", *given, "--out", str(folder)])


def test_a_part_goes_on_behind_a_step_that_fails_and_ends_where_the_device_is_lost(
    part: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(tmp_path, "A") == 1
    shown = capsys.readouterr().out
    for expected in ("NOT GOOD: broken: ValueError: no | such thing", "NOT GOOD: bad: three", "device is lost"):
        assert expected in shown
    assert "| good | three | 3 ms | ≤ 4 | good |" in shown
    steps = json.loads((tmp_path / "A.json").read_text())["steps"]
    assert [one["what"] for one in steps["broken"]["measured"]] == ["one"]
    assert steps["losing"]["error"].startswith("RuntimeError: illegal memory access")
    assert ran(tmp_path, "A", "--resume") == 1  # what was not good still is not
    assert "[1/" not in capsys.readouterr().out


def test_a_part_whose_time_is_up_says_what_is_left(
    part: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(tmp_path, "A:good", "--minutes", "1e-9") == 2
    assert "Left of part A, for --resume: good" in capsys.readouterr().out
    assert ran(tmp_path, "a:good") == 0
    assert ran(tmp_path, "A:bad") == 1
    assert list(json.loads((tmp_path / "A.json").read_text())["steps"]) == ["good", "bad"]


def test_a_report_of_another_machine_is_not_taken_up(part: None, tmp_path: Path) -> None:
    assert ran(tmp_path, "A:good") == 0
    with pytest.raises(UserError, match=r"of another machine or other versions \(device\)"):
        Report(tmp_path / "A.json", {"part": "A", "device": "there"}).resume()
    (tmp_path / "A.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        Report(tmp_path / "A.json", {"part": "A"}).resume()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["Z"], "a part is one of A"),
        (["A:speed"], "steps of part A are limits"),
        (["A", "--minutes", "0"], "--minutes is more than 0"),
        (["A"], "no CUDA device"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(
    given: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ran(tmp_path, *given) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1


def test_what_is_no_number_is_not_good() -> None:
    assert Measured("", float("nan"), "", at_most=1).good is False
    assert Measured("", float("nan"), "", at_least=1).good is False
    assert Measured("", float("nan"), "").good is None
