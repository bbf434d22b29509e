"""Count a key's tokens of the last minute and of the day.

A request takes the most tokens that it may need before it runs, and returns the unused ones at its end. So the sum in a
window never exceeds its limit, however many requests run at once.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MINUTE_SECONDS = 60.0
DAY_SECONDS = 86400


class ServerClock:
    """Seconds since 1970 from the wall clock at the start, and from the monotonic clock afterwards.

    A jump of the wall clock thus starts no new day in a running server.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset = wall() - monotonic()

    def __call__(self) -> float:
        return self._offset + self._monotonic()


@dataclass(slots=True)
class Grant:
    """Tokens taken at once; `tokens` falls as they are returned."""

    at: float
    tokens: int


class TokenWindow:
    """Tokens, or requests, taken within the last `seconds`."""

    def __init__(self, seconds: float = MINUTE_SECONDS) -> None:
        self.seconds = seconds
        self._grants: deque[Grant] = deque()
        self._taken = 0

    def taken(self, now: float) -> int:
        while self._grants and self._grants[0].at <= now - self.seconds:
            self._taken -= self._grants.popleft().tokens
        return self._taken

    def take(self, tokens: int, now: float) -> Grant:
        """Take tokens, even beyond a limit: `wait` says whether they fit."""
        grant = Grant(now, tokens)
        self._grants.append(grant)
        self._taken += tokens
        return grant

    def give_back(self, grant: Grant, tokens: int, now: float) -> None:
        """Return tokens of a grant, at most those that it has left."""
        self.taken(now)
        if grant.at > now - self.seconds:
            self._taken -= tokens
        grant.tokens -= tokens

    def wait(self, tokens: int, limit: int, now: float) -> float:
        """Return seconds until `tokens` more fit without returns; 0 if they do now, infinity if they never do."""
        excess = self.taken(now) + tokens - limit
        for grant in self._grants:
            if excess <= 0:
                break
            excess -= grant.tokens
            if excess <= 0:
                return grant.at + self.seconds - now
        return 0.0 if excess <= 0 else math.inf

    def reset(self, now: float) -> float:
        """Return seconds until all taken tokens have expired."""
        return self._grants[-1].at + self.seconds - now if self.taken(now) else 0.0


class DayCount:
    """Tokens taken since midnight UTC. day: days since 1970. used: tokens of that day, known from an earlier start."""

    def __init__(self, day: int = 0, used: int = 0) -> None:
        self.day, self._taken = day, used

    def taken(self, now: float) -> int:
        if (today := day_of(now)) > self.day:
            self.day, self._taken = today, 0
        return self._taken

    def take(self, tokens: int, now: float) -> Grant:
        """Take tokens, even beyond a limit: `wait` says whether they fit."""
        self.taken(now)
        self._taken += tokens
        return Grant(now, tokens)

    def give_back(self, grant: Grant, tokens: int, now: float) -> None:
        """Return tokens of a grant, at most those that it has left. Those of an earlier day no longer count."""
        self.taken(now)
        if day_of(grant.at) == self.day:
            self._taken -= tokens
        grant.tokens -= tokens

    def wait(self, tokens: int, limit: int, now: float) -> float:
        """Return seconds until `tokens` more fit without returns; 0 if they do now, infinity if they never do."""
        if self.taken(now) + tokens <= limit:
            return 0.0
        return self.reset(now) if tokens <= limit else math.inf

    def reset(self, now: float) -> float:
        """Return seconds until midnight."""
        return DAY_SECONDS - now % DAY_SECONDS


def day_of(now: float) -> int:
    return int(now // DAY_SECONDS)
