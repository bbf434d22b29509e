"""Deadlines: a command stops with everything on disk, and the same command resumes it later."""

from __future__ import annotations

import time


class OutOfTime(Exception):
    """The deadline has passed; everything finished is on disk."""


class Deadline:
    """An end in so many minutes from now; None: never."""

    def __init__(self, minutes: float | None = None) -> None:
        self.end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def passed(self) -> bool:
        return self.end is not None and time.monotonic() >= self.end

    def check(self) -> None:
        """Raise OutOfTime once it has passed."""
        if self.passed:
            raise OutOfTime

    def share(self, parts: int) -> Deadline:
        """A deadline after one of so many equal parts of the time that is left."""
        if self.end is None:
            return self
        return Deadline(max(0.0, self.end - time.monotonic()) / 60 / parts)


NEVER = Deadline()
