"""Who may do what now: the keys in force, and what each has used of its limits."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Iterable
from pathlib import Path

import pyrate_limiter
from pyrate_limiter import Decision, InMemoryBucket, RateItem

from outrider.server.http import keys
from outrider.server.http.errors import ApiError
from outrider.server.http.keys import BadKeys, Key, Rate

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How often the file of keys is looked at."""
BUSY_SECONDS = 1
"""After which a client may ask again that had too many requests at the same time."""


class Holder:
    """A key and what it has used; it outlives changes of the key's limits."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.under_way = 0
        self._bucket = _bucket(key.rate)

    def change(self, key: Key) -> None:
        if key.rate != self.key.rate:
            self._bucket = _bucket(key.rate)
        self.key = key

    def begin(self) -> None:
        """Count a request as under way, until `end`; raises ApiError where that is more than the key may."""
        most = self.key.concurrency
        if most is not None and self.under_way >= most:
            raise ApiError(
                f"key {self.key.name} has {most} requests under way, as many as it may; wait for one of them",
                status=429,
                code="concurrency_limit_exceeded",
                retry_after=BUSY_SECONDS,
            )
        if self._bucket is not None:
            now = self._bucket.now()  # monotonic: no jump of the clock opens or closes the door
            self._bucket.leak(now)
            decision = self._bucket.put_decision(RateItem(self.key.name, now))
            assert isinstance(decision, Decision)  # of a bucket in memory nothing is awaited
            if not decision.allowed:
                raise ApiError(
                    f"key {self.key.name} may send {self.key.rate}",
                    status=429,
                    code="rate_limit_exceeded",
                    retry_after=math.ceil((decision.retry_after_ms or 0) / 1000) or 1,
                )
        self.under_way += 1

    def end(self) -> None:
        self.under_way -= 1


def _bucket(rate: Rate | None) -> InMemoryBucket | None:
    return None if rate is None else InMemoryBucket([pyrate_limiter.Rate(rate.requests, 1000 * rate.seconds)])


class Access:
    """The keys in force.

    api_key: one without limits, an administrator's. path: of the file of keys. With neither, everybody may do
    everything. Raises BadKeys where the file cannot be used.
    """

    def __init__(self, api_key: str | None, path: Path | None) -> None:
        self.path = path
        self._alone = None
        if api_key is not None:
            self._alone = Holder(Key(name="--api-key", digest=keys.digest(api_key.encode()), admin=True))
        self._seen = _signature(path)
        self._holders: tuple[Holder, ...] = ()
        self._take(keys.read(path) if path is not None else ())

    @property
    def open(self) -> bool:
        """Whether no key is asked for."""
        return not self._holders

    def holder(self, authorization: bytes) -> Holder | None:
        """Whose key the header carries. Every key is compared, so that the time tells nothing."""
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        digest = keys.digest(key.strip())
        matching = [holder for holder in self._holders if holder.key.is_key(digest)]
        return matching[0] if matching else None

    async def look(self) -> None:
        """Read the file again if it has changed. One that cannot be used leaves the keys as they are."""
        signature = _signature(self.path)
        if self.path is None or signature == self._seen:
            return
        self._seen = signature
        try:
            self._take(await asyncio.to_thread(keys.read, self.path))  # a large one must not hold up streams
        except BadKeys as error:
            logger.error("the API keys stay as they were: %s", error)
        except Exception as error:  # whatever was written there, the server goes on, and looks again
            logger.exception("the API keys stay as they were: %s cannot be used: %r", self.path, error)
        else:
            logger.warning("API keys read again: %d in %s", len(self._holders) - bool(self._alone), self.path)

    async def watch(self) -> None:
        """Look at the file every second, whatever it has become."""
        while self.path is not None:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    def _take(self, found: Iterable[Key]) -> None:
        former = {holder.key.name: holder for holder in self._holders}
        holders = [self._alone] if self._alone is not None else []
        for key in found:
            holder = former.get(key.name) or Holder(key)
            holder.change(key)
            holders.append(holder)
        self._holders = tuple(holders)


def _signature(path: Path | None) -> tuple[int, ...] | None:
    """Differs when the file does, also where a link to it is exchanged, as Kubernetes does."""
    try:
        found = os.stat(path) if path is not None else None
    except OSError:
        return ()
    # The time of change tells new permissions too, with which a file that could not be read can be.
    return None if found is None else (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)
