"""Tests that are coroutines."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

SECONDS = 60


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run the test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(SECONDS):
                await test(*args, **kwargs)

        asyncio.run(limited())

    return run
