"""Test servers, forked from a process that has made the imports of `outrider serve`.

A small server's start is mostly imports of SGLang and torch: six seconds of a core in each of two processes. Here the
command and its scheduler are forks. Libraries read some variables on import, so there is a process for each
environment, not counting the variables of `LATER`. Tests of starts and ends, and one server of every kind, start
unforked.

As a program it is this process: it reads requests (JSON lines) from a socket, its standard input. It answers with
[number, process id], and when that process has ended with [number, return code].
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from outrider.server.machine.threads import SPINS  # libgomp reads it when torch is imported

CHANGED = str(Path(__file__).parent / "changed_servers")
"""Its `sitecustomize.py` changes servers."""
CLIP, CHANGES = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "OUTRIDER_TEST_CHANGES"
LATER = ("OUTRIDER_CACHE", "OUTRIDER_CPU_KERNELS", "PROMETHEUS_MULTIPROC_DIR", "PYTEST_CURRENT_TEST")
LATER += ("TORCHDYNAMO_DISABLE", "OUTRIDER_TEST_FAILURES", CLIP, CHANGES)
"""Variables not read during imports, or set again by `apply_later`."""


class ForkedProcess:
    """A forked process with the needed methods of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired("outrider serve", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """A process that has imported everything in this environment; see `of`."""

    _known: ClassVar[dict[tuple[tuple[str, str], ...], Forks]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._socket, self._answers = ours, ours.makefile("r")
        self._waiting: dict[int, threading.Event] = {}
        self._started: dict[int, ForkedProcess] = {}
        self._running: dict[int, ForkedProcess] = {}
        self._count = 0
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                env={**environment, "GOMP_SPINCOUNT": str(SPINS)},
                start_new_session=True,
            )
        threading.Thread(target=self._read, daemon=True).start()

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Forks:
        """The process of this environment without LATER."""
        shared = {name: value for name, value in environment.items() if name not in LATER}
        shared[CHANGES] = os.environ.get(CHANGES, "")
        paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
        shared["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([CHANGED, *paths]))
        key = tuple(sorted(shared.items()))
        with cls._lock:
            if key not in cls._known:
                cls._known[key] = cls(shared)
            return cls._known[key]

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        errors: Path,
        program: Path | None = None,
    ) -> ForkedProcess:
        """Start `outrider` with these arguments, or `main` of a Python program; output goes to the files."""
        request = {"arguments": [*arguments], "files": [str(output), str(errors)], "folder": os.getcwd()}
        request |= {"program": str(program), "path": sys.path} if program else {}
        request["later"] = {name: environment.get(name) for name in LATER}
        said = threading.Event()
        with self._lock:
            self._count += 1
            request["number"] = number = self._count
            self._waiting[number] = said
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        if not said.wait(120):
            raise TimeoutError(f"nothing was forked in 120 s; ended with {self.process.poll()}")
        return self._started.pop(number)

    def _read(self) -> None:
        for line in self._answers:
            number, value = json.loads(line)
            if number in self._waiting:
                self._running[number] = self._started[number] = ForkedProcess(value)
                self._waiting.pop(number).set()
            else:
                process = self._running.pop(number)
                process.returncode = value
                process.ended.set()


# -- the process that is forked ---------------------------------------------------------------------------------------


def import_all() -> None:
    """Import in the order of `outrider serve`, as some imports read the environment."""
    import gc

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()
    import outrider.server.cli.serve
    import outrider.server.http.listen
    import outrider.server.settings.resolve

    given = {"SGLANG_PLUGINS": "outrider", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    given["PROMETHEUS_MULTIPROC_DIR"] = "/nowhere"  # each metric reads it when made, but only whether it is set
    unset = {name: value for name, value in given.items() if name not in os.environ}
    os.environ.update(unset)
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.scheduler  # noqa: F401

    import outrider.server.http.app  # noqa: F401

    for name in unset:
        del os.environ[name]
    gc.freeze()
    gc.enable()


def fork_the_schedulers() -> None:
    """Make SGLang's launcher fork a scheduler, or the controller of several engines, which spawns its schedulers, as it
    has threads."""
    import multiprocessing
    from types import SimpleNamespace

    from sglang.srt.entrypoints import engine

    fork = multiprocessing.get_context("fork")

    def run(target: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        import torch

        multiprocessing.set_start_method("spawn", force=True)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
        target(*args, **kwargs)

    def make(*, target: Callable[..., None], **given: Any) -> multiprocessing.process.BaseProcess:
        return fork.Process(target=functools.partial(run, target), **given)

    forking = SimpleNamespace(Pipe=fork.Pipe, Process=make, set_start_method=multiprocessing.set_start_method)
    engine.mp = forking  # type: ignore[assignment]


def compile_no_grammar_before_the_first() -> None:
    """Start the process that compiles grammars with the first grammar: it takes two seconds of a core, and most test
    servers see none."""
    from outrider.server.http.requests.grammar_process import GrammarProcess

    async def not_yet(process: GrammarProcess) -> None:
        pass

    GrammarProcess.begin = not_yet  # type: ignore[method-assign]


def sample_the_event_loop_less() -> None:
    """Wake idle test servers less than a hundred times a second."""
    from outrider.server.http import event_loop

    event_loop.SAMPLE_SECONDS = 0.1


def apply_later(variables: Mapping[str, str | None]) -> None:
    """Set the variables of LATER, and the values that modules have read of them."""
    import sitecustomize
    from sglang.srt.managers import schedule_policy

    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    sitecustomize.make(os.environ.get(CHANGES, ""))
    if CLIP in os.environ:
        schedule_policy.CLIP_MAX_NEW_TOKENS = int(os.environ[CLIP])


def serve_requests() -> dict[str, Any]:
    """Fork for each request; returns in each child, with its request."""
    import selectors

    with socket.socket(fileno=0) as asking, selectors.DefaultSelector() as selector:
        woken, wakes = socket.socketpair()
        for one in (woken, wakes):
            one.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector.register(asking, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        running: dict[int, int] = {}
        received = b""

        def say(*words: int) -> None:
            asking.sendall(json.dumps(words).encode() + b"\n")

        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if woken in ready:
                woken.recv(4096)
                while running:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                    if not pid:
                        break
                    say(running.pop(pid), os.waitstatus_to_exitcode(status))
            if asking in ready:
                more = asking.recv(1 << 16)
                if not more:
                    os._exit(0)
                *lines, received = (received + more).split(b"\n")
                for line in lines:
                    request: dict[str, Any] = json.loads(line)
                    pid = os.fork()
                    if pid == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        woken.close()
                        wakes.close()
                        return request
                    running[pid] = request["number"]
                    say(request["number"], pid)


def main() -> None:
    import_all()
    assert threading.active_count() == 1
    request = serve_requests()
    os.setsid()
    os.chdir(request["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(request["files"], 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    apply_later(request["later"])
    fork_the_schedulers()
    compile_no_grammar_before_the_first()
    sample_the_event_loop_less()
    if "program" in request:
        sys.argv, sys.path = [request["program"], *request["arguments"]], request["path"]
        # Not as __main__, which its spawned processes would import.
        runpy.run_path(request["program"], run_name="program")["main"](*request["arguments"])
        sys.exit(0)
    from outrider.server.cli.main import main as outrider

    sys.argv = [str(Path(sys.executable).with_name("outrider")), *request["arguments"]]
    sys.exit(outrider())


if __name__ == "__main__":
    main()
