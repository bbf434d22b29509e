"""The end of a node with a part of a model."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.server.http import lifecycle
from outrider.server.http.lifecycle import State
from outrider.server.http.worker_node import WorkerNodeLifecycle
from outrider.server.processes.engine_processes import EngineProcesses
from outrider.server.processes.process import StartupReport
from outrider.server.processes.run_folder import RunFolder

SOON = 0.2


def life_of(processes: EngineProcesses, acts: list[str], drain_seconds: float = 30.0) -> WorkerNodeLifecycle:
    """`acts` happen in turn: "term", or the name of a process that ends."""

    async def live() -> WorkerNodeLifecycle:
        life = WorkerNodeLifecycle(processes, drain_seconds)
        life.server = SimpleNamespace(should_exit=False)
        life.begin()
        life.up()
        assert life.accepting
        for act in acts:
            await asyncio.sleep(SOON)
            os.kill(os.getpid() if act == "term" else processes.processes[act].pid, signal.SIGTERM)
        async with asyncio.timeout(10):
            while not life.server.should_exit:
                await asyncio.sleep(0.01)
        life.end()
        return life

    return asyncio.run(live())


@pytest.fixture
def processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[EngineProcesses]:
    """An engine of one process, with this exit code."""
    monkeypatch.setattr(lifecycle, "LINGER_SECONDS", SOON)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_leave_with, args=(request.param,))
    process.start()
    folder = RunFolder.make()
    yield EngineProcesses(
        processes={"scheduler_0": process}, run_folder=folder, report=StartupReport(folder.path / "failure")
    )
    process.kill()
    process.join()
    folder.remove()


def _leave_with(code: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.sigwait({signal.SIGTERM})
    os._exit(code)


@pytest.mark.parametrize("processes", [0], indirect=True)
def test_it_ends_well_when_the_first_node_has_ended_it(processes: EngineProcesses) -> None:
    life = life_of(processes, ["scheduler_0"])
    assert (life.exit_code, life.state) == (0, State.DRAINING)


@pytest.mark.parametrize("processes", [0], indirect=True)
def test_on_a_signal_it_waits_for_the_first_node(processes: EngineProcesses) -> None:
    life = life_of(processes, ["term", "scheduler_0"])
    assert life.exit_code == 0
    assert processes.dead_processes() == ["scheduler_0"]


@pytest.mark.parametrize("processes", [0], indirect=True)
def test_it_does_not_wait_for_ever_or_after_a_second_signal(processes: EngineProcesses) -> None:
    assert life_of(processes, ["term"], drain_seconds=SOON).exit_code == 0
    assert life_of(processes, ["term", "term"]).exit_code == 0
    assert processes.dead_processes() == []


@pytest.mark.parametrize("processes", [1], indirect=True)
def test_a_lost_node_ends_all_nodes(processes: EngineProcesses, caplog: pytest.LogCaptureFixture) -> None:
    life = life_of(processes, ["scheduler_0"])
    assert (life.exit_code, life.state) == (1, State.FAILED)
    assert not life.healthy
    assert "scheduler_0 died: another node is gone, or this one failed; stopping" in caplog.messages
