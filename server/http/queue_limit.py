"""No more requests wait for the engine than are told to; those beyond are refused at once, instead of late."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from outrider.server.http.errors import ApiError

BUSY_SECONDS = 1
"""After which a refused client may ask again."""


class QueueLimit:
    """manager: SGLang's tokenizer manager. most: requests that may wait, each choice one; None is any number."""

    def __init__(self, manager: Any, most: int | None) -> None:
        self.manager = manager
        self.most = most
        self._entering = 0

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """Around the checks of a request, before the manager knows of it; raises ApiError like `check`."""
        self.check()
        self._entering += 1
        try:
            yield
        finally:
            self._entering -= 1

    def check(self) -> None:
        """Raises ApiError while that many wait.

        By what the schedulers publish every few steps and, since that is late in a burst, by what is under way here,
        which is never more than all their places and so many besides."""
        under_way = len(self.manager.rid_to_state) + self._entering
        if self.most is None or under_way < self.most:
            return
        loads = self.manager.load_snapshot_reader.read_all()
        waiting = sum(load.num_waiting_reqs for load in loads)
        places = sum(load.max_running_requests for load in loads)
        if waiting >= self.most or under_way >= places + self.most:
            raise ApiError(
                f"the server is busy: {self.most} requests wait, as many as may; try again, or another server",
                status=429,
                code="queue_full",
                retry_after=BUSY_SECONDS,
            )
