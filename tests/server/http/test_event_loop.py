"""The watchdog of the event loop: it measures what holds it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY

from outrider.server.http import event_loop
from outrider.server.http.event_loop import WINDOW_SECONDS, EventLoopWatchdog

NAME = "outrider_event_loop_stall_seconds"
LONGEST = "outrider_event_loop_longest_stall_seconds"


@pytest.fixture
def watchdog() -> Iterator[EventLoopWatchdog]:
    made = EventLoopWatchdog()
    yield made
    for metric in (made._stalls, made._longest):
        REGISTRY.unregister(metric)


def value(name: str) -> float:
    found = REGISTRY.get_sample_value(name)
    assert found is not None
    return found


def test_a_held_loop_is_measured(watchdog: EventLoopWatchdog) -> None:
    async def hold() -> None:
        watching = asyncio.create_task(watchdog.watch())
        await asyncio.sleep(0.1)
        time.sleep(0.4)
        await asyncio.sleep(0.1)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    asyncio.run(hold())
    assert value(f"{NAME}_count") >= 1
    assert value(LONGEST) >= 0.4 - 2 * event_loop.SAMPLE_SECONDS


def test_the_longest_is_that_of_the_last_minute(watchdog: EventLoopWatchdog) -> None:
    for now, stall, longest in (
        (0.0, 0.001, 0.0),  # too short to count
        (1.0, 0.5, 0.5),
        (2.0, 0.2, 0.5),
        (3.0, 0.3, 0.5),
        (1.5 + WINDOW_SECONDS, 0.0, 0.3),  # the first is forgotten, and the second was shorter than the third
        (2.5 + WINDOW_SECONDS, 0.02, 0.3),
        (3.5 + WINDOW_SECONDS, 0.0, 0.02),
        (9.0 + 2 * WINDOW_SECONDS, 0.0, 0.0),
    ):
        watchdog.note(now, stall)
        assert value(LONGEST) == longest
    assert value(f"{NAME}_count") == 4
