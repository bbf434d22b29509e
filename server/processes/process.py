"""Targets of SGLang's processes: they run SGLang's code, end with their parent, and report why a start failed."""

import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from ..machine.threads import Placement

PR_SET_PDEATHSIG = 1
LOG_LEVEL = "OUTRIDER_LOG_LEVEL"
"""Environment variable of a started process: our loggers' level there. SGLang gives all loggers its own level."""

PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
"""Errors of gloo and NCCL when another rank has ended."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without garbage collection, which takes a quarter of the time: a million objects stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes started inside leave SIGINT and SIGTERM to their parent.

    Ctrl-C in a terminal, and some supervisors, signal the whole process group. A scheduler that obeyed would end the
    requests that we are about to drain. A started process inherits the block; this process receives the signal when
    the block ends.
    """
    # Python's resource tracker lifts the block when it starts: so start it before.
    resource_tracker.ensure_running()
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


class StartupReport:
    """Brings the reason of a failed start from a process to its parent, in a file that exists only during the start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def started(self) -> None:
        self.path.unlink(missing_ok=True)

    @property
    def starting(self) -> bool:
        return self.path.exists()

    def write(self, reason: str) -> None:
        if self.starting and not self.read():
            self.path.write_text(reason)

    def read(self) -> str:
        try:
            return self.path.read_text().strip()
        except OSError:
            return ""


def run_scheduler(
    report: StartupReport, placements: Sequence[Placement], parent: int, verbose: bool, *args: Any, **kwargs: Any
) -> None:
    """Run a scheduler process. placements: one per scheduler of this machine."""
    placement = placements[scheduler_index(args) % len(placements)]
    target = "sglang.srt.managers.scheduler", "run_scheduler_process"
    _run(target, report, parent, verbose, *args, place=placement.apply, **kwargs)


def engine_index(scheduler_args: tuple[Any, ...]) -> int:
    """Return the number of the scheduler's engine, its data-parallel rank; 0 if there is only one."""
    return scheduler_args[5] or 0


def scheduler_index(scheduler_args: tuple[Any, ...]) -> int:
    """Return the number of the engine plus the tensor-parallel rank; on a CPU one of the two is 0."""
    return engine_index(scheduler_args) + int(scheduler_args[3])


def run_detokenizer(report: StartupReport, parent: int, verbose: bool, *args: Any, **kwargs: Any) -> None:
    target = "sglang.srt.managers.detokenizer_manager", "run_detokenizer_process"
    _run(target, report, parent, verbose, *args, **kwargs)


def _run(
    target: tuple[str, str],
    report: StartupReport,
    parent: int,
    verbose: bool,
    *args: Any,
    place: Callable[[], None] = lambda: None,
    **kwargs: Any,
) -> None:
    """Run SGLang's target, given as module and function. place: called once the module is imported."""
    die_with(parent)
    module, name = target
    logging.getLogger("outrider").setLevel(os.environ[LOG_LEVEL])
    logging.getLogger(module).addFilter(FailureFilter(report, verbose))
    try:
        with quick_imports():
            run = getattr(importlib.import_module(module), name)
        place()
        run(*args, **kwargs)
    except Exception as error:
        # SGLang catches exceptions inside its loop; this one comes from before it.
        report.write(last_line("".join(traceback.format_exception(error))))
        if verbose or not report.starting:
            raise
        sys.exit(1)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, also if that ended during our imports."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class FailureFilter(logging.Filter):
    """Shortens SGLang's logged traceback of a failure to one line, during the start and if another rank has failed."""

    def __init__(self, report: StartupReport, verbose: bool) -> None:
        super().__init__()
        self.report = report
        self.verbose = verbose

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "hit an exception" not in message:
            return True
        reason = last_line(message)
        if any(sign in reason for sign in PEER_GONE):
            reason = f"another rank of the engine is gone ({reason})"
            if not self.verbose:
                record.msg, record.args = reason, ()
        if not self.report.starting:
            return True
        self.report.write(reason)
        return self.verbose


def last_line(text: str) -> str:
    """Return the line of a traceback that names the exception."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    named = [line for line in text.splitlines() if line and not line[0].isspace() and ":" in line]
    return (named or lines or ["unknown"])[-1].strip()
