"""Start the scheduler's process before its arguments are known, which saves seconds of a start.

The scheduler spends most of its start on importing SGLang and torch, and its parent imports them too before it knows
the arguments. So the process starts first and imports meanwhile. SGLang's launcher starts its processes itself, from
arguments that it computes. We replace the module that it starts them with:

1. `WaitingScheduler` starts a process that imports the scheduler and then waits at a pipe.
2. `launcher.Launcher` replaces the module `multiprocessing` (`mp`) in `sglang.srt.entrypoints.engine` by it while
   SGLang launches its one scheduler.
3. Then `mp.Pipe(duplex=False)` returns the pipe that the process waits at, `mp.Process(target=…, args=…)` the process,
   and its `start()` sends target, arguments and environment through the pipe. SGLang's writing end of the pipe is
   among the arguments; the process already holds that end and uses its own.

SGLang must call `mp.Pipe` and `mp.Process` once each. `tests/server/processes/test_prefork.py` lets SGLang launch a
process that way. If a later SGLang needs more, the start fails with an AttributeError or TypeError that names it;
`engine.start` without a WaitingScheduler is slower by these seconds and otherwise the same.
"""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import setproctitle

from .process import StartupReport, die_with, last_line, quick_imports, signals_blocked


class _ChildsEnd:
    """Placeholder of the child's end among the arguments: a pipe's end cannot be sent through itself."""


class WaitingScheduler:
    """Replacement of the module `multiprocessing` in SGLang's launcher, with one pipe and one process."""

    def __init__(self, report: StartupReport, verbose: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, childs_end = context.Pipe()
        self._process = context.Process(target=_wait, args=(childs_end, report, os.getpid(), verbose))
        with signals_blocked():
            self._process.start()
        childs_end.close()

    def Pipe(self, duplex: bool) -> tuple[Connection, type[_ChildsEnd]]:
        """Return the parent's end, and the placeholder of the child's."""
        return self._connection, _ChildsEnd

    def Process(self, target: Callable[..., None], args: tuple[Any, ...]) -> BaseProcess:
        """Return the waiting process; its `start` sends the task."""

        def start() -> None:
            self._connection.send((target, args, dict(os.environ)))

        self._process.start = start  # type: ignore[method-assign]
        return self._process


def _wait(connection: Connection, report: StartupReport, parent: int, verbose: bool) -> None:
    """Import, wait for the task, and run it: the target of the process."""
    die_with(parent)
    # It can only name the process later if it finds the environment as the process began.
    setproctitle.getproctitle()
    try:
        with quick_imports():
            import sglang.srt.managers.scheduler  # noqa: F401

        target, args, environ = connection.recv()
    except Exception as error:
        report.write(last_line("".join(traceback.format_exception(error))))
        if verbose:
            raise
        sys.exit(1)
    os.environ.update(environ)
    target(*(connection if value is _ChildsEnd else value for value in args))
