"""A scheduler process that is started before it is known what it will be told, to save seconds of a start.

What takes the scheduler longest is importing SGLang and torch, and its parent imports them as well before it can say
what to serve. So the process is started first and imports meanwhile. SGLang's launcher starts its processes itself,
though, from arguments that it works out itself. The trick is to be what it starts them with:

1. `WaitingScheduler` starts a process that imports the scheduler and then waits at a pipe.
2. `launcher.Launcher` puts it in the place of the module `multiprocessing` (`mp`) in `sglang.srt.entrypoints.engine`,
   for as long as SGLang launches its one scheduler.
3. There `mp.Pipe(duplex=False)` gives the pipe that the process waits at, `mp.Process(target=…, args=…)` the process,
   and its `start()` sends target, arguments and environment down the pipe. Of the arguments, SGLang's writing end of
   the pipe becomes the end that the process holds already.

It relies on SGLang to ask `mp` for these two, so called, and once each. `tests/server/processes/test_prefork.py` has
SGLang launch a process that way. Should a later SGLang ask for more, the start fails with an AttributeError or
TypeError that names it; not using a WaitingScheduler (`engine.start`) costs the seconds and is otherwise the same.
"""

from __future__ import annotations

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
    """Stands for the child's end of the pipe until the child has its task: an end cannot be sent through itself."""


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
        """The parent's end, and what stands for the child's among the arguments of its process."""
        return self._connection, _ChildsEnd

    def Process(self, target: Callable[..., None], args: tuple[Any, ...]) -> BaseProcess:
        """The process that waits; its `start` sends it what to do."""

        def start() -> None:
            self._connection.send((target, args, dict(os.environ)))

        self._process.start = start  # type: ignore[method-assign]
        return self._process


def _wait(connection: Connection, report: StartupReport, parent: int, verbose: bool) -> None:
    """Target of the process: import, wait for the task, run it."""
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
