"""An engine without an HTTP server around it, for commands that measure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tqdm import tqdm

from ..settings.resolve import Resolved
from . import engine as engines
from .engine import Engine

T = TypeVar("T")


def run(resolved: Resolved, work: Callable[[Engine], Awaitable[T]]) -> T:
    """Start the engine, run `work(engine)` on its event loop, stop the engine; what `work` returned.

    Raises UserError with one line where the engine cannot start.
    """
    # By default tqdm's lock is one between processes, which would be missed when the engine's processes are ended.
    tqdm.set_lock(threading.RLock())
    engine = engines.start(resolved)

    async def main() -> T:
        engine.begin()
        try:
            return await work(engine)
        finally:
            if not engine.dead_processes():
                engine.ask_to_exit()

    try:
        return asyncio.run(main())
    finally:
        engine.stop(engines.EXIT_SECONDS)
