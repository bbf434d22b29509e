"""Work that is done while nobody is served, piece by piece, and given up at once when a request arrives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

T = TypeVar("T")

QUIET_SECONDS = 3.0
"""Without a request before a piece of work begins: a conversation's pauses are its own."""


class Traffic(Protocol):
    """Who is being served."""

    async def quiet(self, seconds: float) -> None:
        """Return when nobody has been served for so long."""

    async def arrival(self) -> None:
        """Return when somebody is served, at once where somebody is."""


class Idle:
    def __init__(self, traffic: Traffic, quiet_seconds: float = QUIET_SECONDS) -> None:
        self.traffic = traffic
        self.quiet_seconds = quiet_seconds

    async def run(self, piece: Callable[[], Awaitable[T]]) -> T:
        """What `piece` returns, undisturbed: it is cancelled when a request arrives, and begun again later."""
        while True:
            await self.traffic.quiet(self.quiet_seconds)
            work, arrival = asyncio.ensure_future(piece()), asyncio.ensure_future(self.traffic.arrival())
            try:
                await asyncio.wait({work, arrival}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    return work.result()
            finally:
                for task in (work, arrival):
                    task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work


async def at_once(piece: Callable[[], Awaitable[T]]) -> T:
    """As `Idle.run`, for an engine that serves nobody else."""
    return await piece()
