"""Steps of `outrider gpu-check` that run commands: how they end, and what becomes of their numbers."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from running import wait_until

from outrider.server.cli.main import main
from outrider.server.errors import UserError
from outrider.server.gpu_check import cli, endurance, large, load, lossless, parts, training
from outrider.server.gpu_check.commands import Commands, NotReached
from outrider.server.gpu_check.report import Measured

DEVICE: Any = SimpleNamespace(
    on=torch.device("cpu"), tiny=True, environment=dict(os.environ), release=lambda: None, used=lambda: 0,
    synchronise=lambda: None, about=lambda: {"device": "here"},
)  # fmt: skip


def commands(folder: Path, seconds: float = 60.0) -> Commands:
    return Commands(DEVICE, folder / "work", folder, time.monotonic() + seconds)


def test_a_command_and_what_it_started_end_with_the_time(tmp_path: Path) -> None:
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(NotReached):
        commands(tmp_path, seconds=2.0).run("slow", [sys.executable, "-c", parent])
    pid = int((tmp_path / "work" / "slow.log").read_text())
    wait_until(lambda: not psutil.pid_exists(pid), 10)


def test_a_command_that_fails_is_an_error_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"outrider version ended with 2: .*--nope"):
        commands(tmp_path).outrider("bad", "version", "--nope")
    with pytest.raises(UserError, match=r"the server ended with 2: .*--gamma"):  # noqa: SIM117
        with commands(tmp_path).server("gone", "--gamma", "many"):
            pytest.fail("it cannot have started")


def reached(given: Commands) -> Iterator[Measured]:
    yield Measured("whole", 1, "", at_least=1)


def cut(given: Commands) -> Iterator[Measured]:
    yield Measured("half", 1, "", at_least=2)
    raise NotReached


def test_what_was_not_reached_is_written_down_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = {"cut": cut, "reached": reached}
    monkeypatch.setattr(cli.devices, "make", lambda name, tiny: DEVICE)
    part = dataclasses.replace(parts.PARTS["C"], steps=dict.fromkeys(checks, ""))
    monkeypatch.setitem(parts.PARTS, "C", part)
    monkeypatch.setattr(parts, "check", lambda letter, step: checks[step])
    assert main(["gpu-check", "C", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "| cut | half | 1 | ≥ 2 | NOT GOOD |\n| cut | | | | not reached |" in shown
    assert "Left of part C, for --resume: cut\n" in shown
    written = json.loads((tmp_path / "C.json").read_text())
    assert list(written["steps"]) == ["reached"]
    assert [one["what"] for one in written["not_reached"]["cut"]] == ["half"]
    checks["cut"] = reached
    assert main(["gpu-check", "C", "--out", str(tmp_path), "--resume"]) == 0
    assert "[1/1] cut" in capsys.readouterr().out
    assert json.loads((tmp_path / "C.json").read_text())["not_reached"] == {}


def test_of_tests_that_ran_it_is_said_which_failed(tmp_path: Path) -> None:
    tests = tmp_path / "test_two.py"
    tests.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
    )
    junit = tmp_path / "found.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tests)]
    assert commands(tmp_path).run("two", [*command, "--junitxml", str(junit)], PYTEST_DISABLE_PLUGIN_AUTOLOAD="1") == 1
    found = [(one.what, one.value, one.good) for one in lossless.outcomes(junit)]
    assert found == [("tests", 2, True), ("tests", 1, False), ("test_b", 1, False)]


@pytest.mark.parametrize("tests", [lossless.greedy, lossless.planned, lossless.rules, lossless.sampled, lossless.seeds])
def test_every_word_of_a_choice_of_tests_finds_some(tests: lossless.Tests) -> None:
    text = (lossless.TESTS / tests.file).read_text()
    names = [line.partition("(")[0] for line in text.splitlines() if line.startswith("def test_")]
    for word in [*tests.chosen.split(" or "), tests.tiny]:
        assert any(word in name for name in names) or f"{word}_server" in text, word


def test_every_step_of_every_part_is_there() -> None:
    for letter, part in parts.PARTS.items():
        assert all(callable(parts.check(letter, step)) for step in part.steps)


def test_the_target_has_its_drafters_layers() -> None:
    config = large.target_config(large.step.LARGE)
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (4096, 36, 151_936)
    assert (config["head_dim"], config["num_key_value_heads"], config["intermediate_size"]) == (128, 8, 12_288)


def test_loads_faults_and_runs_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = commands(tmp_path)
    given.folder.mkdir()
    monkeypatch.setattr(Commands, "outrider", lambda self, *arguments, **more: None)
    rounds = {arm: [{"throughput": rate}] for arm, rate in (("off", 90.0), ("verify all", 100.0), ("planned", 95.0))}
    (given.folder / "load-8.json").write_text(json.dumps({"2": rounds}))
    assert [one.value for one in load.load_8(given)] == [90.0, 100.0, 95.0, 0.95]

    soak = {"counts": {"asked": {"given up": 2, "greedy": 3}, "changed": 0, "compared": 3}, "seconds": 9, "faults": []}
    (given.folder / "soak-fa3.json").write_text(json.dumps(soak | {"faults": ["the cache did not become empty"]}))
    monkeypatch.setattr(Commands, "run", lambda self, *arguments, **more: 1)
    monkeypatch.setattr(Commands, "server", lambda self, *flags, **more: nullcontext("url"))
    bad = [one.what for one in endurance.fa3(given) if one.good is False]
    assert bad == ["the cache did not become empty", "faults"]

    made = given.folder / "dllm" / "delta"
    made.mkdir(parents=True)
    (made / "training.json").write_text('{"steps": 1, "seconds": 3}')
    (made.parent / "losses.csv").write_text("step,agreement\n20,\n40,0.5\n60,\n")
    monkeypatch.setattr(training.target, "plain_folder", lambda wanted: "")
    run = training.dllm(given)
    assert [next(run).value for _ in range(3)] == [1, (made / "training.json").stat().st_size, 0.5]
    with pytest.raises(NotReached):  # the second of two steps
        next(run)
    assert (tmp_path / "dllm" / "training.json").is_file()
