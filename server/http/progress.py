"""Watches the engine's progress: while it has requests, its steps have to end."""

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
"""Shortest time between two looks at the schedulers."""


class Progress:
    """Tells an engine that computes, however slowly, from one that stands still.

    A scheduler publishes its numbers after every chunk of a prompt, every 15 decode steps and while requests wait for
    room; a step changes them. With answers that come from it they are the signs of progress. A client that reads
    nothing holds none of them up.

    manager: SGLang's tokenizer manager. seconds: without a sign, with requests under way, that are too many.
    """

    def __init__(self, manager: Any, seconds: float) -> None:
        self._manager = manager
        self._seconds = seconds
        self._seen: dict[int, LoadSnapshot] = {}  # by engine
        self._since: dict[int, float] = {}  # by engine: its last sign, or when it last had nothing to do
        self._received: object = None
        self._last_sign = time.monotonic()
        self._stalled_seconds = 0.0
        self._probe: asyncio.Task[Any] | None = None

    @property
    def stalled(self) -> float | None:
        """Seconds without progress, where those are too many."""
        return self._stalled_seconds if self._stalled_seconds >= self._seconds else None

    async def watch(self) -> None:
        """Look from time to time; the log has the beginning and the end of a stall."""
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
        """now: seconds of a monotonic clock."""
        loads = _read(self._manager.load_snapshot_reader)
        for load in loads:
            load.timestamp = 0.0  # it goes on while requests only wait
            if load != self._seen.get(load.dp_rank):
                self._seen[load.dp_rank], self._last_sign = load, now
                self._since[load.dp_rank] = now
            elif not _busy(load):
                self._since[load.dp_rank] = now
        if self._received != (received := self._manager.last_receive_tstamp):
            self._received, self._last_sign = received, now
        if not self._seen or not _under_way(self._manager):
            self._last_sign, self._since = now, dict.fromkeys(self._since, now)
        # With several engines, others' progress says nothing of the one that stands still.
        signs = self._since.values() if len(self._since) > 1 else ()
        self._stalled_seconds = now - min([self._last_sign, *signs])
        if self._stalled_seconds >= self._seconds / 2 and not any(map(_busy, self._seen.values())):
            self._probe_schedulers()

    def _probe_schedulers(self) -> None:
        """Schedulers that had nothing to do may stand still before what was sent to them; their answer is a sign."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.get_running_loop().create_task(worker_rpc.read_live(self._manager))


def _busy(load: LoadSnapshot) -> bool:
    return load.num_running_reqs + load.num_waiting_reqs > 0


def _under_way(manager: Any) -> bool:
    """Tell whether the engine has been sent a request whose end has not come back."""
    states = manager.rid_to_state.values()
    return any(getattr(state, "dispatched", True) and not state.finished for state in states)


def _read(reader: Any) -> list[LoadSnapshot]:
    """Published states of this machine's schedulers.

    They are read without their lock, which a stopped scheduler may hold; a record that is being written is left out.
    """
    from sglang.srt.managers.load_snapshot import ShmLoadSnapshotReader

    if not isinstance(reader, ShmLoadSnapshotReader):
        return list(reader.read_all())
    if not reader._attach():
        return []
    found = (reader._read_slot(rank) for rank in range(reader.dp_size))
    return [load for load in found if load is not None]
