"""Watch the engine's progress: while it has requests, its steps have to end."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from ..plugin import worker_rpc

if TYPE_CHECKING:
    from sglang.srt.managers.load_snapshot import LoadSnapshot

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Longest time between two checks of the schedulers."""


class EngineProgress:
    """Distinguishes a slow engine from a stalled one.

    A scheduler publishes its numbers after every chunk of a prompt, every 15 decode steps and while requests wait for
    room. Changed numbers and arriving answers are signs of progress; a client that stops reading delays neither.

    manager: SGLang's tokenizer manager. seconds: longest time without a sign while requests run.
    """

    def __init__(self, manager: Any, seconds: float) -> None:
        self._manager = manager
        self._seconds = seconds
        self._seen: dict[int, LoadSnapshot] = {}  # by engine
        self._since: dict[int, float] = {}  # by engine: its last sign, or the last time it was idle
        self._received: object = None
        self._last_sign = time.monotonic()
        self._stalled_seconds = 0.0
        self._probe: asyncio.Task[Any] | None = None

    @property
    def stalled(self) -> float | None:
        """Seconds without progress if they are too many, else None."""
        return self._stalled_seconds if self._stalled_seconds >= self._seconds else None

    async def watch(self) -> None:
        """Check until cancelled, and log the beginning and the end of a stall."""
        while True:
            await asyncio.sleep(min(POLL_SECONDS, self._seconds / 5))
            before = self.stalled
            self.check(time.monotonic())
            if before is None and self.stalled is not None:
                logger.error("%s: /health says so, and requests are refused", self.reason)
            elif before is not None and self.stalled is None:
                logger.warning("the engine makes progress again")

    @property
    def reason(self) -> str:
        return f"requests are under way and no step has ended for {self._stalled_seconds:.0f} s (--max-step-seconds)"

    def check(self, now: float) -> None:
        """Check progress. now: seconds of a monotonic clock."""
        loads = _read(self._manager.load_snapshot_reader)
        for load in loads:
            load.timestamp = 0.0  # it advances even if requests only wait
            if load != self._seen.get(load.dp_rank):
                self._seen[load.dp_rank], self._last_sign = load, now
                self._since[load.dp_rank] = now
            elif not _busy(load):
                self._since[load.dp_rank] = now
        if self._received != (received := self._manager.last_receive_tstamp):
            self._received, self._last_sign = received, now
        if not self._seen or not _under_way(self._manager):
            self._last_sign, self._since = now, dict.fromkeys(self._since, now)
        # One of several engines may stall while the rest makes progress.
        signs = self._since.values() if len(self._since) > 1 else ()
        self._stalled_seconds = now - min([self._last_sign, *signs])
        if self._stalled_seconds >= self._seconds / 2 and not any(map(_busy, self._seen.values())):
            self._probe_schedulers()

    def _probe_schedulers(self) -> None:
        """Ping idle schedulers, which may stall before they read a request; an answer is a sign of progress."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.get_running_loop().create_task(worker_rpc.read_live(self._manager))


def _busy(load: LoadSnapshot) -> bool:
    return load.num_running_reqs + load.num_waiting_reqs > 0


def _under_way(manager: Any) -> bool:
    """Return True if a request that was sent to the engine has not ended."""
    states = manager.rid_to_state.values()
    return any(getattr(state, "dispatched", True) and not state.finished for state in states)


def _read(reader: Any) -> list[LoadSnapshot]:
    """Return the published states of this machine's schedulers.

    Reads them without their lock, which a stopped scheduler may hold, and skips a record that is being written.
    """
    from sglang.srt.managers.load_snapshot import ShmLoadSnapshotReader

    if not isinstance(reader, ShmLoadSnapshotReader):
        return list(reader.read_all())
    if not reader._attach():
        return []
    slots = (reader._read_slot(rank) for rank in range(reader.dp_size))
    return [load for load in slots if load is not None]
