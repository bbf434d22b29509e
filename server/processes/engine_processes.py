"""The processes of an engine on this machine: watched, and stopped."""

import asyncio
import contextlib
import signal
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

import psutil

from .process import StartupReport
from .run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class EngineProcesses:
    """The processes of an engine that run on this node; on the first node an `Engine`.

    report: gives the reason if an engine cannot start.
    """

    processes: dict[str, BaseProcess]
    run_folder: RunFolder
    report: StartupReport

    def dead_processes(self) -> list[str]:
        return [name for name, process in self.processes.items() if not process.is_alive()]

    def exited_cleanly(self) -> bool:
        """Return True if no process has ended with an error."""
        return not any(process.exitcode for process in self.processes.values())

    async def wait_for_death(self) -> list[str]:
        """Return as soon as a process has ended, with the names of all ended processes."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        # A sentinel becomes readable when its process ends: no polling.
        sentinels = [process.sentinel for process in self.processes.values()]
        for sentinel in sentinels:
            loop.add_reader(sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            for sentinel in sentinels:
                loop.remove_reader(sentinel)
        while not (names := self.dead_processes()):
            await asyncio.sleep(0.01)  # a process closes its files shortly before it has an exit code
        return names

    def fail_requests(self, message: str) -> None:
        """End every running request with an error. Only the first machine has requests."""

    def abort_requests(self) -> None:
        """Tell the scheduler to abort all requests."""

    def ask_to_exit(self) -> None:
        """Ask the schedulers to free their memory and exit. Only the first machine asks."""

    def stop(self, grace: float) -> None:
        """Wait up to `grace` seconds for the schedulers to exit, then kill the rest. Returns when all are gone."""
        deadline = time.monotonic() + grace
        for name, process in self.processes.items():
            if name.startswith("scheduler"):
                process.join(max(0.0, deadline - time.monotonic()))
        kill_children()
        self.run_folder.remove()


def kill_children() -> None:
    """Kill all processes that this one has started."""
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # a process of the engine may send it as its sibling dies
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=20)
