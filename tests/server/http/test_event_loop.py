"""The watchdog of the event loop measures uninterrupted work."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
from in_loop import in_loop
from prometheus_client import REGISTRY

from outrider.server.http import event_loop
from outrider.server.http.event_loop import WINDOW_SECONDS, EventLoopWatchdog

WORK = "outrider_event_loop_work_seconds_count"
LONGEST = "outrider_event_loop_longest_work_seconds"
LATEST = "outrider_event_loop_latest_turn_seconds"


@pytest.fixture
def watchdog() -> Iterator[EventLoopWatchdog]:
    made = EventLoopWatchdog()
    yield made
    for metric in (made._works, made._longest_work.gauge, made._latest_turn.gauge):
        REGISTRY.unregister(metric)


def value(name: str) -> float:
    sample = REGISTRY.get_sample_value(name)
    assert sample is not None
    return sample


@in_loop
async def held(watchdog: EventLoopWatchdog, hold: Callable[[], None]) -> None:
    """Watch a loop that `hold` blocks once."""
    watching = asyncio.create_task(watchdog.watch())
    await asyncio.sleep(0.1)
    hold()
    await asyncio.sleep(0.1)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


def test_work_is_measured(watchdog: EventLoopWatchdog) -> None:
    def work() -> None:
        ends = time.thread_time() + 0.4
        while time.thread_time() < ends:
            pass

    held(watchdog, work)
    assert value(WORK) >= 1
    assert value(LONGEST) >= 0.4 - 2 * event_loop.SAMPLE_SECONDS
    assert value(LATEST) >= value(LONGEST)


def test_waiting_is_no_work(watchdog: EventLoopWatchdog) -> None:
    """A waiting thread uses no processor time."""
    held(watchdog, lambda: time.sleep(0.4))
    assert value(LATEST) >= 0.4 - 2 * event_loop.SAMPLE_SECONDS
    assert value(LONGEST) < 0.2


def test_the_longest_is_that_of_the_last_minute(watchdog: EventLoopWatchdog) -> None:
    for now, work, longest in (
        (0.0, 0.001, 0.0),
        (1.0, 0.5, 0.5),
        (2.0, 0.2, 0.5),
        (3.0, 0.3, 0.5),
        (1.5 + WINDOW_SECONDS, 0.0, 0.3),  # the first is forgotten; the second was shorter
        (2.5 + WINDOW_SECONDS, 0.02, 0.3),
        (3.5 + WINDOW_SECONDS, 0.0, 0.02),
        (9.0 + 2 * WINDOW_SECONDS, 0.0, 0.0),
    ):
        watchdog.note(now, late=2 * work, work=work)
        assert value(LONGEST) == longest
        assert value(LATEST) == 2 * longest
    assert value(WORK) == 4


def test_work_of_turns_that_came_in_time_does_not_count(watchdog: EventLoopWatchdog) -> None:
    watchdog.note(0.0, late=0.02, work=0.03)
    assert value(LONGEST) == 0.02
