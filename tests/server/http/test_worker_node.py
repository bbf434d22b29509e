"""The end of a node with a part of a model."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from in_loop import in_loop

from outrider.server.http import lifecycle
from outrider.server.http.lifecycle import State
from outrider.server.http.worker_node import WorkerNodeLifecycle
from outrider.server.processes.engine_processes import EngineProcesses
from outrider.server.processes.process import StartupReport
from outrider.server.processes.run_folder import RunFolder

SOON = 0.2


def _leave_with(code: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.sigwait({signal.SIGTERM})
    os._exit(code)


@pytest.fixture
def processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[EngineProcesses]:
    """An engine of one process, with this exit code."""
    monkeypatch.setattr(lifecycle, "LINGER_SECONDS", SOON)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    process = multiprocessing.get_context("fork").Process(target=_leave_with, args=(request.param,))
    process.start()
    folder = RunFolder.make()
    yield EngineProcesses({"scheduler_0": process}, folder, StartupReport(folder.path / "failure"))
    process.kill()
    process.join()
    folder.remove()


async def lived(processes: EngineProcesses, acts: list[str], drain_seconds: float) -> WorkerNodeLifecycle:
    """`acts` happen in turn: "term", or the name of a process that ends."""
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


@pytest.mark.parametrize(
    ("processes", "acts", "drain_seconds", "dead"),
    [
        pytest.param(0, ["scheduler_0"], 30.0, ["scheduler_0"], id="the first node ends it"),
        pytest.param(0, ["term", "scheduler_0"], 30.0, ["scheduler_0"], id="a signal: waits for the first node"),
        pytest.param(0, ["term"], SOON, [], id="a signal: not for ever"),
        pytest.param(0, ["term", "term"], 30.0, [], id="two signals"),
    ],
    indirect=["processes"],
)
@in_loop
async def test_it_ends_well(processes: EngineProcesses, acts: list[str], drain_seconds: float, dead: list[str]) -> None:
    life = await lived(processes, acts, drain_seconds)
    assert (life.exit_code, life.state) == (0, State.DRAINING)
    assert processes.dead_processes() == dead


@pytest.mark.parametrize("processes", [1], indirect=True)
@in_loop
async def test_a_lost_node_ends_all_nodes(processes: EngineProcesses, caplog: pytest.LogCaptureFixture) -> None:
    life = await lived(processes, ["scheduler_0"], 30.0)
    assert (life.exit_code, life.state, life.healthy) == (1, State.FAILED, False)
    assert "scheduler_0 died: another node is gone, or this one failed; stopping" in caplog.messages
