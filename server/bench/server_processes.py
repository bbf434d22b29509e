"""The processes of a server on this machine, with their memory and processor time."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

import psutil

MB = 1 << 20
LEARNER = "learner"
"""Name of the process that trains a server's drafter."""


@dataclass(frozen=True, slots=True)
class ServerProcesses:
    """Processes of one server, by name."""

    processes: Mapping[str, psutil.Process]

    def shared_once(self) -> float:
        """Memory of all processes, MB; shared memory counts once."""
        found = 0.0
        for process in self.processes.values():
            with contextlib.suppress(psutil.Error):
                found += process.memory_full_info().pss / MB
        return found

    def processor_seconds(self) -> float:
        """Processor time so far, in seconds, of all processes but the learner."""
        return sum(self.seconds_of(name) or 0.0 for name in self.processes if name != LEARNER)

    def seconds_of(self, name: str) -> float | None:
        """Processor time of all threads of one process so far; None if it cannot be read."""
        if name in self.processes:
            with contextlib.suppress(psutil.Error):
                return float(sum(self.processes[name].cpu_times()[:2]))
        return None


def of_server(url: str) -> ServerProcesses | None:
    """The process that listens at `url`, with its children; None if it is on another machine or we may not see it."""
    parts = urlsplit(url)
    if not _is_here(parts.hostname or ""):
        return None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        listening = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
        pid = next((c.pid for c in listening if c.laddr.port == port), None)
        if pid is None:
            return None
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return None
    named: dict[str, psutil.Process] = {}
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            name = _name(process, root)
            named[name if name not in named else f"{name} {process.pid}"] = process
    return ServerProcesses(named)


@contextlib.contextmanager
def suspended(processes: Iterable[psutil.Process]) -> Iterator[None]:
    """Stop the processes inside the context."""
    stopped = list(processes)
    try:
        for process in stopped:
            with contextlib.suppress(psutil.Error):
                process.suspend()
        yield
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.Error):
                process.resume()


def _is_here(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _name(process: psutil.Process, root: psutil.Process) -> str:
    if process == root:
        return "server"
    title = " ".join(process.cmdline())
    if "drafters.learning.process" in title:
        return LEARNER
    if "sglang::" in title:
        return title.partition("::")[2].split()[0]
    return "resource_tracker" if "resource_tracker" in title else process.name()
