"""Work piece by piece while the server is idle, on one core on average. A request interrupts it at once."""

import asyncio
import time
from collections.abc import Awaitable, Callable
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
    """Runs pieces of work in idle time. cores: kept busy by a piece; with the pause after it, one on average."""

    def __init__(self, traffic: Traffic, quiet_seconds: float = QUIET_SECONDS, *, cores: int = 1) -> None:
        self.traffic, self.quiet_seconds, self.cores = traffic, quiet_seconds, cores
        self._rest_until = 0.0

    async def run(self, piece: Callable[[], Awaitable[T]]) -> T:
        """Run `piece` undisturbed and return its result; a request cancels it, and it is started again later."""
        while True:
            await asyncio.sleep(max(0.0, self._rest_until - time.monotonic()))
            await self.traffic.wait_until_quiet(self.quiet_seconds)
            started = time.monotonic()
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
