"""Measure how late the event loop's turns come, and how much of that its own work causes.

A turn comes late because the loop's thread worked, or because it waited for a core or for Python's interpreter lock, as
on any busy machine. The thread's processor time distinguishes the two.
"""

import asyncio
import time
from collections import deque

from prometheus_client import Gauge, Histogram

SAMPLE_SECONDS = 0.01
"""Time between two requested turns; the precision of measured work."""
NOTED_SECONDS = 0.01
"""Shorter delays are not counted."""
WINDOW_SECONDS = 60.0
BUCKETS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)


class EventLoopWatchdog:
    """Measures the event loop that runs `watch`, as metrics."""

    def __init__(self) -> None:
        self._works = Histogram(
            "outrider_event_loop_work_seconds",
            "Work of the HTTP process's event loop without a turn for others, from 10 ms of processor time on.",
            buckets=BUCKETS,
        )
        self._longest_work = Longest(
            "outrider_event_loop_longest_work_seconds", "The longest of them within the last minute."
        )
        self._latest_turn = Longest(
            "outrider_event_loop_latest_turn_seconds",
            "How late a turn of the event loop came at most within the last minute, by work or by waiting for a core "
            "or the interpreter lock.",
        )

    async def watch(self) -> None:
        """Measure until cancelled."""
        worked = time.thread_time()
        while True:
            due = time.monotonic() + SAMPLE_SECONDS
            await asyncio.sleep(SAMPLE_SECONDS)
            now, worked_before, worked = time.monotonic(), worked, time.thread_time()
            self.note(now, late=now - due, work=worked - worked_before)

    def note(self, now: float, *, late: float, work: float) -> None:
        """Count a turn. now: `time.monotonic()`. late: its delay in seconds. work: seconds of processor time of the
        loop's thread since the last turn; only as many as `late` are counted."""
        work = min(work, late)
        if work >= NOTED_SECONDS:
            self._works.observe(work)
        self._longest_work.note(now, work)
        self._latest_turn.note(now, late)


class Longest:
    """A gauge of the longest time within the last minute."""

    def __init__(self, name: str, text: str) -> None:
        self.gauge = Gauge(name, text, multiprocess_mode="max")
        self.gauge.set(0)
        self._recent: deque[tuple[float, float]] = deque()
        """(time, duration), each longer than all later ones."""

    def note(self, now: float, seconds: float) -> None:
        """now: seconds on the clock of `time.monotonic`."""
        before = self._recent[0] if self._recent else None
        while self._recent and now - self._recent[0][0] > WINDOW_SECONDS:
            self._recent.popleft()
        if seconds >= NOTED_SECONDS:
            while self._recent and self._recent[-1][1] <= seconds:
                self._recent.pop()
            self._recent.append((now, seconds))
        longest = self._recent[0] if self._recent else None
        if longest != before:
            self.gauge.set(longest[1] if longest else 0)
