"""Deadlines: a command stops with everything on disk, and the same command resumes it later."""

from __future__ import annotations

import math
import time


class OutOfTime(Exception):
    """The deadline has passed; everything finished is on disk."""


class Deadline:
    """An end in `minutes` from now; None: never."""

    def __init__(self, minutes: float | None = None) -> None:
        self.end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def passed(self) -> bool:
        return self.end is not None and time.monotonic() >= self.end

    @property
    def minutes_left(self) -> float:
        """Minutes until the end; infinite without one."""
        return math.inf if self.end is None else max(0.0, self.end - time.monotonic()) / 60

    def check(self) -> None:
        """Raise OutOfTime once it has passed."""
        if self.passed:
            raise OutOfTime

    def share(self, parts: int) -> Deadline:
        """Return a deadline after one of `parts` equal parts of the remaining time."""
        return self if self.end is None else Deadline(self.minutes_left / parts)


NEVER = Deadline()
