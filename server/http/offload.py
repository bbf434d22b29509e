"""Threads for the work on large requests and answers, while the event loop goes on with other streams.

Two threads, so that requests of a common size do not wait behind the largest. No more, since each takes its turn of
Python's interpreter lock before the event loop gets its own.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

LARGE_BYTES = 128 * 1024
"""Bodies and answers from this size on run in the second thread."""
SWITCH_SECONDS = 0.001
"""A thread with the interpreter lock gives it up after this time when another wants it."""

P = ParamSpec("P")
T = TypeVar("T")

_common = ThreadPoolExecutor(1, "outrider-prepare")
_large = ThreadPoolExecutor(1, "outrider-prepare-large")


def shorten_switch_interval() -> None:
    """Have threads give up the interpreter lock soon; called once by the process of the server."""
    sys.setswitchinterval(SWITCH_SECONDS)


def freeze_loaded_objects() -> None:
    """Exclude the 400,000 objects loaded so far from garbage collection, which would stop the event loop for 0.2 s."""
    gc.collect()
    gc.freeze()


async def run(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in one of the threads; returns or raises what it does. size: bytes of the body or the answer."""
    context = contextvars.copy_context()
    executor = _large if size >= LARGE_BYTES else _common
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(executor, lambda: context.run(work, *args, **kwargs))
