"""The process that compiles grammars: `python -m outrider.server.plugin.grammars.worker FOLDER`.

It reads jobs from its standard input and writes verdicts to its standard output, one JSON object a line; a withdrawn
job gets an empty one. Each grammar is compiled in a copy of the process (fork) with a limit of memory, which is killed
when it takes too long. So each grammar's memory is freed and the next is not affected. A copy costs milliseconds,
because all modules are imported before.

The copies run on half of the machine's cores and, unless they finish at once, give way to the engine. Slow grammars
starve no other request's: a compilation that has had its share of time makes room for waiting ones.
"""

import json
import os
import resource
import select
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .folder import GrammarFolder


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """seconds: from a job's arrival to its verdict. memory: bytes that a compilation may allocate.
    places: compilations at the same time. share: seconds of processor time after which one gives way.
    waiting: jobs that may wait for a place."""

    seconds: float = 4.0
    memory: int = 256 * 1024 * 1024
    places: int = 3
    share: float = 0.15
    waiting: int = 32


QUICK_SECONDS, NICE = 0.05, 10
"""Processor time within which an ordinary grammar is compiled, and the niceness of longer compilations."""
LEAST_USED = 0.25
"""Share of its time that a compilation must have computed to be refused for taking too long."""
THREADS = 8
"""Most threads of a compilation."""
POLL_SECONDS = 0.02
READY = b"ready\n"
"""The line that the process writes when it can take jobs."""
OUT_OF_MEMORY = 3
"""Exit code of a copy."""


class Examines(Protocol):
    """A job, done in a copy of the process; see `examine.Examiner`."""

    def examine(self, kind: str, text: str, name: str) -> Any: ...


@dataclass(slots=True)
class Job:
    """One grammar to examine. number: given by the sender. arrived: by the monotonic clock."""

    number: int
    kind: str
    text: str
    name: str
    arrived: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class Running:
    """A copy of the process at work. pipe: carries its verdict."""

    job: Job
    process: int
    pipe: int
    begun: float
    slow: bool = False


class Compilations:
    """Waiting and running jobs; single-threaded, so that a copy never inherits a held lock."""

    def __init__(self, examiner: Examines, limits: CompileLimits) -> None:
        self._examiner, self._limits = examiner, limits
        self._waiting: deque[Job] = deque()
        self._running: list[Running] = []

    def pipes(self) -> dict[int, Running]:
        return {running.pipe: running for running in self._running}

    def add(self, job: Job) -> None:
        """Take a job; `advance` starts it."""
        self._waiting.append(job)

    def withdraw(self, number: int) -> None:
        """Give up a job; it gets no verdict."""
        for job in [job for job in self._waiting if job.number == number]:
            self._waiting.remove(job)
        for running in [running for running in self._running if running.job.number == number]:
            self._kill(running)

    def advance(self) -> list[dict[str, Any]]:
        """End jobs that ran out of time and start waiting ones; return verdicts."""
        now, verdicts = time.monotonic(), []
        while len(self._waiting) > self._limits.waiting + self._limits.places:
            verdicts.append(_busy(self._waiting.pop()))
        for running in list(self._running):
            if now - running.job.arrived > self._limits.seconds:
                verdicts.append(self._timed_out(running))
            elif not running.slow and (used := used_seconds(running.process)) > QUICK_SECONDS:
                os.setpriority(os.PRIO_PROCESS, running.process, NICE)
                running.slow = used > self._limits.share
        while self._waiting and now - self._waiting[0].arrived > self._limits.seconds:
            verdicts.append(_busy(self._waiting.popleft()))
        while self._waiting and (len(self._running) < self._limits.places or self._make_room(verdicts)):
            self._start(self._waiting.popleft())
        return verdicts

    def finish(self, running: Running) -> dict[str, Any]:
        """Read the verdict of a copy that has written it, or has ended without one."""
        written = b""
        while chunk := os.read(running.pipe, 1 << 16):
            written += chunk
        self._running.remove(running)
        os.close(running.pipe)
        _, status = os.waitpid(running.process, 0)
        if written and not status:
            return {"number": running.job.number, **json.loads(written)}
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if ended in (signal.SIGXCPU, signal.SIGKILL):
            reason = self._too_long()
        elif ended == signal.SIGABRT or os.waitstatus_to_exitcode(status) == OUT_OF_MEMORY:
            reason = f"takes more than {self._limits.memory >> 20} MiB of memory to compile; simplify it"
        else:
            reason = "cannot be compiled; simplify it"
        return _verdict(running.job, "costly", reason)

    def end(self) -> None:
        """Kill all running compilations."""
        for running in list(self._running):
            self._kill(running)

    def _timed_out(self, running: Running) -> dict[str, Any]:
        """Return the verdict on a grammar that ran out of time. One that hardly had a processor is not to blame."""
        used = self._kill(running)
        if used < self._limits.seconds * LEAST_USED:
            return _busy(running.job)
        return _verdict(running.job, "costly", self._too_long())

    def _too_long(self) -> str:
        return f"takes longer than {self._limits.seconds:g} s to compile; simplify it"

    def _make_room(self, verdicts: list[dict[str, Any]]) -> bool:
        """End the compilation that runs longest, if it has had its share."""
        slowest = min(self._running, key=lambda running: running.begun)
        if not slowest.slow:
            return False
        self._kill(slowest)
        verdicts.append(_busy(slowest.job))
        return True

    def _start(self, job: Job) -> None:
        readable, writable = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(readable)
            self._work(job, writable)
        os.close(writable)
        self._running.append(Running(job, process, readable, time.monotonic()))

    def _work(self, job: Job, pipe: int) -> None:
        """Run the job in the forked copy, which ends here."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)  # the parent reads verdicts there, not a library's log
            os.dup2(silence, 2)
            limit(self._limits)
            verdict = self._examiner.examine(job.kind, job.text, job.name).to_json().encode()
            while verdict:
                verdict = verdict[os.write(pipe, verdict) :]
            code = 0
        except MemoryError:
            code = OUT_OF_MEMORY
        finally:
            os._exit(code)

    def _kill(self, running: Running) -> float:
        """End a compilation; return the seconds of processor time that it had."""
        os.kill(running.process, signal.SIGKILL)
        used = os.wait4(running.process, 0)[2]
        os.close(running.pipe)
        self._running.remove(running)
        return used.ru_utime + used.ru_stime


def used_seconds(process: int) -> float:
    """Return the processor time of a running process."""
    ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def limit(limits: CompileLimits) -> None:
    """Make the system end this process when it takes more than it may."""
    data = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    most = int(data.split()[1]) * 1024 + limits.memory
    # Not the address space: allocators reserve far more of it for each thread than they use.
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    seconds = (int(limits.seconds) + 1) * THREADS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _verdict(job: Job, outcome: str, reason: str) -> dict[str, Any]:
    return {"number": job.number, "outcome": outcome, "reason": reason}


def _busy(job: Job) -> dict[str, Any]:
    return _verdict(job, "busy", "too many grammars are being compiled; try again")


def serve(compilations: Compilations, jobs: int, verdicts: int) -> None:
    """Take jobs from one file descriptor and write verdicts to another, until the first is closed."""
    unread = b""
    while True:
        pipes = compilations.pipes()
        ready, _, _ = select.select([jobs, *pipes], [], [], POLL_SECONDS if pipes else None)
        results = [compilations.finish(pipes[pipe]) for pipe in ready if pipe != jobs]
        if jobs in ready:
            chunk = os.read(jobs, 1 << 16)
            if not chunk:
                compilations.end()
                return
            *lines, unread = (unread + chunk).split(b"\n")
            for fields in map(json.loads, lines):
                if (number := fields.get("withdrawn")) is None:
                    compilations.add(Job(**fields))
                else:
                    compilations.withdraw(number)
                    results.append({"number": number})
        results += compilations.advance()
        for result in results:
            os.write(verdicts, json.dumps(result).encode() + b"\n")


def cores() -> list[int]:
    """Return half of the cores that this process may use, at least one: the last ones."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[-max(1, len(usable) // 2) :]


def main() -> None:
    # The server's parent may signal the whole group; this process ends when the server closes its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.sched_setaffinity(0, cores())
    os.environ["OMP_NUM_THREADS"] = "1"  # no torch computation here, and a copy would lack the threads
    from .examine import Examiner

    folder = GrammarFolder(Path(sys.argv[1]))
    options = folder.read_options()
    if options is None:
        sys.exit(f"{folder.path} says of no tokenizer")
    examiner = Examiner.of(folder, options, threads=min(len(cores()), THREADS))
    os.write(sys.stdout.fileno(), READY)
    serve(Compilations(examiner, CompileLimits()), sys.stdin.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    main()
