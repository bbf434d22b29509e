"""The keys in force, and the use of their limits."""

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ApiError
from . import key_file
from .key_file import BadKeys, Key
from .token_limits import MINUTE_SECONDS, DayCount, Grant, ServerClock, TokenWindow, day_of

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Time between two checks of the file of keys."""
FLAG_KEY_NAME = "--api-key"
"""Name of the key that is in no file."""


@dataclass(frozen=True, slots=True)
class KeyBudget:
    """A limit of tokens and its use. name: for messages."""

    name: str
    limit: int
    count: TokenWindow | DayCount


class KeyUsage:
    """A key and its use, which survives changes of the key's limits.

    clock: seconds since 1970, monotonic. day: tokens, known from an earlier start.
    """

    def __init__(self, key: Key, clock: Callable[[], float], day: DayCount | None = None) -> None:
        self.key = key
        self.under_way = 0
        self.clock = clock
        self.minute, self.day = TokenWindow(), day or DayCount()
        self._requests = _request_window(key)

    def change(self, key: Key) -> None:
        if key.rate != self.key.rate:
            self._requests = _request_window(key)
        self.key = key

    def begin(self) -> None:
        """Count a running request of one choice, until `end`. Raises ApiError if the key's limits forbid it."""
        self._require_places(1)
        if (rate := self.key.rate) is not None:
            if (wait := self._requests.wait(1, rate.requests, now := self.clock())) > 0:
                raise ApiError(
                    f"key {self.key.name} may send {rate}",
                    status=429,
                    code="rate_limit_exceeded",
                    retry_after=math.ceil(wait),
                )
            self._requests.take(1, now)
        self.under_way += 1

    def add_choices(self, choices: int) -> None:
        """Count further choices of a begun request. Raises ApiError if the key's limit forbids them."""
        if self.key.concurrency is not None and choices >= self.key.concurrency:
            raise ApiError(
                f"the request has {choices + 1} choices (n for each prompt), and key {self.key.name} may have "
                f"{self.key.concurrency} at the same time; ask for fewer",
                param="n",
                code="too_many_choices",
            )
        self._require_places(choices)
        self.under_way += choices

    def end(self, choices: int) -> None:
        self.under_way -= choices

    def _require_places(self, choices: int) -> None:
        most = self.key.concurrency
        if most is not None and self.under_way + choices > most:
            raise ApiError(
                f"key {self.key.name} may have {most} choices under way, of all its requests together, and has "
                f"{self.under_way}; wait for one of them",
                status=429,
                code="concurrency_limit_exceeded",
            )

    @property
    def budgets(self) -> list[KeyBudget]:
        limits = (("a minute", self.key.tokens_per_minute, self.minute), ("a day", self.key.tokens_per_day, self.day))
        return [KeyBudget(name, limit, count) for name, limit, count in limits if limit is not None]

    def take(self, tokens: int) -> tuple[Grant, Grant]:
        """Take tokens of the minute and of the day. Raises ApiError if the key has fewer left."""
        now = self.clock()
        for budget in self.budgets:
            if (wait := budget.count.wait(tokens, budget.limit, now)) > 0:
                raise ApiError(
                    f"key {self.key.name} may take {budget.limit} tokens {budget.name} and has "
                    f"{max(0, budget.limit - budget.count.taken(now))} left; this request may take {tokens}: its prompt"
                    " and the longest answer that it asks for (max_tokens); try later, or ask for less",
                    status=429,
                    code="token_limit_exceeded",
                    retry_after=math.ceil(wait) if math.isfinite(wait) else None,
                )
        return self.minute.take(tokens, now), self.day.take(tokens, now)

    def settle(self, grants: Sequence[tuple[Grant, Grant]], used: int) -> None:
        """Return a request's unused tokens to its grants, or take the tokens that it used beyond them."""
        now, unused = self.clock(), sum(minute.tokens for minute, _ in grants) - used
        for minute, day in reversed(grants):
            rest = max(0, min(unused, minute.tokens))
            self.minute.give_back(minute, rest, now)
            self.day.give_back(day, rest, now)
            unused -= rest
        if unused < 0:
            self.minute.take(-unused, now)
            self.day.take(-unused, now)

    def headers(self) -> Iterator[tuple[bytes, bytes]]:
        """Return OpenAI's `x-ratelimit-…` headers of the key's limits; of two token limits the one with less left."""
        now = self.clock()
        if (rate := self.key.rate) is not None:
            reset = self._requests.reset(now)
            yield from _limit_headers("requests", rate.requests, self._requests.taken(now), reset)
        if budgets := self.budgets:
            budget = min(budgets, key=lambda budget: budget.limit - budget.count.taken(now))
            yield from _limit_headers("tokens", budget.limit, budget.count.taken(now), budget.count.reset(now))


def _limit_headers(what: str, limit: int, taken: int, reset: float) -> Iterator[tuple[bytes, bytes]]:
    values = {"limit": limit, "remaining": max(0, limit - taken), "reset": _duration(reset)}
    return ((f"x-ratelimit-{name}-{what}".encode(), str(value).encode()) for name, value in values.items())


def _duration(seconds: float) -> str:
    """Return a duration in OpenAI's format: 1h2m3s, 850ms."""
    if 0 < seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, left = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{left}s"


def _request_window(key: Key) -> TokenWindow:
    return TokenWindow(key.rate.seconds if key.rate else MINUTE_SECONDS)


class Access:
    """The keys in force.

    api_key: an administrator's key without limits. path: of the file of keys. With neither, requests need no key.
    clock: seconds since 1970, monotonic. used: today's tokens by the keys' names, from an earlier start. Raises BadKeys
    if the file cannot be used.
    """

    def __init__(
        self,
        api_key: str | None,
        path: Path | None,
        *,
        clock: Callable[[], float] | None = None,
        used: Mapping[str, int] | None = None,
    ) -> None:
        self.path = path
        self.clock = clock or ServerClock()
        self._started, self._used = day_of(self.clock()), dict(used or {})
        self._known: dict[str, KeyUsage] = {}  # by name, also of removed keys: a key may return
        self._flag_key = None
        if api_key is not None:
            self._flag_key = Key(name=FLAG_KEY_NAME, digest=key_file.digest(api_key.encode()), admin=True)
        self._seen = _signature(path)
        self._key_usages: tuple[KeyUsage, ...] = ()
        self._set_keys(key_file.read(path) if path is not None else ())

    @property
    def open(self) -> bool:
        """True if requests need no key."""
        return not self._key_usages

    @property
    def keys(self) -> list[Key]:
        return [key_usage.key for key_usage in self._key_usages]

    def key_usage(self, authorization: bytes) -> KeyUsage | None:
        """Return the usage of the header's key; None if unknown. All keys are compared, so timing reveals none."""
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        digest = key_file.digest(key.strip())
        matching = [key_usage for key_usage in self._key_usages if key_usage.key.is_key(digest)]
        return matching[0] if matching else None

    async def reload_if_changed(self) -> None:
        """Read the file again if it has changed; if it is unusable, log that and keep the keys."""
        signature = _signature(self.path)
        if self.path is None or signature == self._seen:
            return
        self._seen = signature
        try:
            self._set_keys(await asyncio.to_thread(key_file.read, self.path))  # a large one must not hold up streams
        except BadKeys as error:
            logger.error("the API keys stay as they were: %s", error)
        except Exception as error:  # the server keeps its keys until the file changes again
            logger.exception("the API keys stay as they were: %s cannot be used: %r", self.path, error)
        else:
            logger.warning("API keys read again: %d in %s", len(self._key_usages) - bool(self._flag_key), self.path)

    async def watch(self) -> None:
        """Poll the file until cancelled."""
        while self.path is not None:
            await asyncio.sleep(POLL_SECONDS)
            await self.reload_if_changed()

    def used_today(self) -> tuple[int, dict[str, int]]:
        """Return the day, see `token_limits.day_of`, and each key's tokens of that day, by its name."""
        now = self.clock()
        used = self._used if day_of(now) == self._started else {}
        taken = {name: key_usage.day.taken(now) for name, key_usage in self._known.items()}
        return day_of(now), {name: tokens for name, tokens in (used | taken).items() if tokens}

    def _set_keys(self, keys: Iterable[Key]) -> None:
        keys = (*((self._flag_key,) if self._flag_key is not None else ()), *keys)
        for key in keys:
            if key.name not in self._known:
                before = DayCount(self._started, self._used.get(key.name, 0))
                self._known[key.name] = KeyUsage(key, self.clock, before)
            self._known[key.name].change(key)
        self._key_usages = tuple(self._known[key.name] for key in keys)


def _signature(path: Path | None) -> tuple[int, ...] | None:
    """Return a value that changes with the file, or with a link to it, as Kubernetes replaces one."""
    try:
        stat = os.stat(path) if path is not None else None
    except OSError:
        return ()
    # The time of change also shows new permissions, which may make an unreadable file readable.
    return None if stat is None else (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)
