"""Work piece by piece while the server is idle, at the lowest priority and on one core on average. A request interrupts
it at once."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

T = TypeVar("T")

QUIET_SECONDS = 3.0
"""Seconds without a request before a piece of work begins: a conversation has pauses."""


class Traffic(Protocol):
    """The requests that a server answers."""

    async def wait_until_quiet(self, seconds: float) -> None:
        """Return after `seconds` without a running request."""

    async def wait_for_request(self) -> None:
        """Return when a request runs, at once if one does."""


class Idle:
    """Runs pieces of work in idle time. cores: that a piece keeps busy; the rest after each brings the average to one.
    processes: ids of the computing processes."""

    def __init__(
        self, traffic: Traffic, quiet_seconds: float = QUIET_SECONDS, *, cores: int = 1, processes: Sequence[int] = ()
    ) -> None:
        self.traffic = traffic
        self.quiet_seconds = quiet_seconds
        self.cores = cores
        self.processes = processes if processes and can_restore_priority() else ()
        self._rest_until = 0.0

    async def run(self, piece: Callable[[], Awaitable[T]]) -> T:
        """Run `piece` undisturbed and return its result; a request cancels it, and it is started again later."""
        while True:
            await asyncio.sleep(max(0.0, self._rest_until - time.monotonic()))
            await self.traffic.wait_until_quiet(self.quiet_seconds)
            started = time.monotonic()
            with lowest_priority(self.processes):
                work, arrival = asyncio.ensure_future(piece()), asyncio.ensure_future(self.traffic.wait_for_request())
                try:
                    await asyncio.wait({work, arrival}, return_when=asyncio.FIRST_COMPLETED)
                    if work.done():
                        return work.result()
                finally:
                    for task in (work, arrival):
                        task.cancel()
                    now = time.monotonic()
                    self._rest_until = now + (now - started) * (self.cores - 1)
            await asyncio.wait({work})  # not `await work`: a cancellation that arrives here is the caller's
            if not work.cancelled():
                return work.result()


async def run_now(piece: Callable[[], Awaitable[T]]) -> T:
    """Run a piece now, for an engine without users."""
    return await piece()


class IdleBudget:
    """Seconds of work, without pauses between its pieces. seconds: the limit; None: none. spent: seconds so far."""

    def __init__(self, seconds: float | None, spent: float = 0.0) -> None:
        self.seconds, self.spent = seconds, spent

    @property
    def exhausted(self) -> bool:
        return self.seconds is not None and self.spent > self.seconds

    def timed(self, piece: Callable[[], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
        """Return the piece with its time counted, even if it is interrupted."""

        async def work() -> T:
            started = time.monotonic()
            try:
                return await piece()
            finally:
                self.spent += time.monotonic() - started

        return work


@contextlib.contextmanager
def lowest_priority(processes: Sequence[int]) -> Iterator[None]:
    """Let processes run only on cores that no other process on the machine wants."""
    if os.sched_getscheduler(0) == os.SCHED_IDLE:  # the whole server was started so
        processes = ()
    _schedule(processes, os.SCHED_OTHER, os.SCHED_IDLE)
    try:
        yield
    finally:
        _schedule(processes, os.SCHED_IDLE, os.SCHED_OTHER)  # also threads started meanwhile


def _schedule(processes: Sequence[int], old: int, new: int) -> None:
    for process in processes:
        with contextlib.suppress(FileNotFoundError):  # it has ended
            for thread in Path(f"/proc/{process}/task").iterdir():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if os.sched_getscheduler(int(thread.name)) == old:
                        os.sched_setscheduler(int(thread.name), new, os.sched_param(0))


def can_restore_priority() -> bool:
    """Return True if a thread may leave the lowest priority again: Linux requires RLIMIT_NICE or CAP_SYS_NICE."""
    restored = []

    def attempt() -> None:
        with contextlib.suppress(PermissionError):
            before = os.sched_getscheduler(0)
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(0, before, os.sched_param(0))
            restored.append(True)

    thread = threading.Thread(target=attempt)  # which may stay at the lowest priority: it ends
    thread.start()
    thread.join()
    return bool(restored)
