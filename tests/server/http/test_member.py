"""A node that computes a part of a model whose requests another node takes: how it ends."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.server.engine.part import Part
from outrider.server.engine.process import StartupReport
from outrider.server.engine.run_folder import RunFolder
from outrider.server.http import lifecycle
from outrider.server.http.lifecycle import State
from outrider.server.http.member import Membership

SOON = 0.2


def life_of(part: Part, acts: list[str], drain_seconds: float = 30.0) -> Membership:
    """Its whole life; `acts` come one after the other: "term", or the name of a process that is to end."""

    async def live() -> Membership:
        life = Membership(part, drain_seconds)
        life.server = SimpleNamespace(should_exit=False)
        life.begin()
        life.up()
        assert life.accepting
        for act in acts:
            await asyncio.sleep(SOON)
            os.kill(os.getpid() if act == "term" else part.processes[act].pid, signal.SIGTERM)
        async with asyncio.timeout(10):
            while not life.server.should_exit:
                await asyncio.sleep(0.01)
        life.end()
        return life

    return asyncio.run(live())


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Part]:
    """Of one process, which ends with the code that is the test's parameter when it is told to."""
    monkeypatch.setattr(lifecycle, "LINGER_SECONDS", SOON)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_leave_with, args=(request.param,))
    process.start()
    folder = RunFolder.make()
    yield Part(processes={"scheduler_0": process}, run_folder=folder, report=StartupReport(folder.path / "failure"))
    process.kill()
    process.join()
    folder.remove()


def _leave_with(code: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.sigwait({signal.SIGTERM})
    os._exit(code)


@pytest.mark.parametrize("part", [0], indirect=True)
def test_it_ends_well_when_the_first_node_has_ended_it(part: Part) -> None:
    life = life_of(part, ["scheduler_0"])
    assert (life.exit_code, life.state) == (0, State.DRAINING)


@pytest.mark.parametrize("part", [0], indirect=True)
def test_asked_to_stop_it_waits_for_the_first_node(part: Part) -> None:
    life = life_of(part, ["term", "scheduler_0"])
    assert life.exit_code == 0
    assert part.dead_processes() == ["scheduler_0"]


@pytest.mark.parametrize("part", [0], indirect=True)
def test_but_not_for_ever_and_not_when_it_is_asked_twice(part: Part) -> None:
    assert life_of(part, ["term"], drain_seconds=SOON).exit_code == 0
    assert life_of(part, ["term", "term"]).exit_code == 0
    assert part.dead_processes() == []


@pytest.mark.parametrize("part", [1], indirect=True)
def test_a_node_that_is_lost_takes_the_others_along(part: Part, caplog: pytest.LogCaptureFixture) -> None:
    life = life_of(part, ["scheduler_0"])
    assert (life.exit_code, life.state) == (1, State.FAILED)
    assert not life.healthy
    assert "scheduler_0 died: another node is gone, or this one failed; stopping" in caplog.messages
