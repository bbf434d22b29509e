"""The watchdog of the event loop: how long something held it, so that nothing else was answered or streamed."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from prometheus_client import Gauge, Histogram

SAMPLE_SECONDS = 0.01
"""The loop is asked for a turn so often; a stall is measured to within this."""
NOTED_SECONDS = 0.01
"""Shorter ones are not counted."""
WINDOW_SECONDS = 60.0
BUCKETS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)


class EventLoopWatchdog:
    """Measures by how much turns of the event loop come late."""

    def __init__(self) -> None:
        self._stalls = Histogram(
            "outrider_event_loop_stall_seconds",
            "Times for which the HTTP process's event loop was held without a turn for others, from 10 ms on.",
            buckets=BUCKETS,
        )
        self._longest = Gauge(
            "outrider_event_loop_longest_stall_seconds",
            "The longest of them within the last minute.",
            multiprocess_mode="max",
        )
        self._longest.set(0)
        self._recent: deque[tuple[float, float]] = deque()
        """(when, how long), each longer than all that came later."""

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            due = time.monotonic() + SAMPLE_SECONDS
            await asyncio.sleep(SAMPLE_SECONDS)
            now = time.monotonic()
            self.note(now, now - due)

    def note(self, now: float, stall: float) -> None:
        """now: seconds on the clock of `time.monotonic`. stall: seconds that a turn came late."""
        before = self._recent[0] if self._recent else None
        while self._recent and now - self._recent[0][0] > WINDOW_SECONDS:
            self._recent.popleft()
        if stall >= NOTED_SECONDS:
            self._stalls.observe(stall)
            while self._recent and self._recent[-1][1] <= stall:
                self._recent.pop()
            self._recent.append((now, stall))
        longest = self._recent[0] if self._recent else None
        if longest != before:
            self._longest.set(longest[1] if longest else 0)
