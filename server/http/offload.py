"""Process large requests and answers in threads, while the event loop serves other streams.

Two threads: requests of a common size do not wait for the largest. A third would delay the event loop, which competes
with them for Python's interpreter lock.
"""

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
"""A thread releases the interpreter lock after this time if another thread wants it."""

P = ParamSpec("P")
T = TypeVar("T")

_common = ThreadPoolExecutor(1, "outrider-prepare")
_large = ThreadPoolExecutor(1, "outrider-prepare-large")


def shorten_switch_interval() -> None:
    """Make threads release the interpreter lock sooner. The server's process calls it once."""
    sys.setswitchinterval(SWITCH_SECONDS)


def freeze_loaded_objects() -> None:
    """Exclude the 400,000 objects loaded so far from garbage collection, which would stop the event loop for 0.2 s."""
    gc.collect()
    gc.freeze()


async def run(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in one of the threads and return its result. size: bytes of the body or the answer."""
    context = contextvars.copy_context()
    executor = _large if size >= LARGE_BYTES else _common
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(executor, lambda: context.run(work, *args, **kwargs))
