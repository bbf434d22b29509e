"""An engine without an HTTP server around it, for commands that measure."""

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
    """Start the engine, run `work(engine)` on its event loop, stop the engine; returns the result of `work`.

    Raises UserError with one line if the engine cannot start.
    """
    # tqdm's default lock spans processes and would be lost when the engine's processes are killed.
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
