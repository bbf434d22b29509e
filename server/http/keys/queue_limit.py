"""Limit the waiting choices: refuse further ones at once."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import ApiError
from . import admission
from .metering import ChoiceTable


@dataclass
class QueueLimit:
    """manager: SGLang's tokenizer manager. table: choices in the engine. most: choices that may wait; None: any."""

    manager: Any
    table: ChoiceTable
    most: int | None
    _entering: int = 0

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """Hold a place during a request's checks, before its choices are known; raises ApiError like `check`."""
        self.check()
        self._entering += 1
        try:
            yield
        finally:
            self._entering -= 1

    def check_choices(self, choices: int) -> None:
        """Count the choices of a request after reading it. Raises ApiError if they are too many now, or always."""
        if self.most is not None and choices > self._running_limit() + self.most:
            raise ApiError(
                f"the request has {choices} choices (n for each prompt); this server runs {self._running_limit()} at a "
                f"time, and lets {self.most} wait; ask for fewer",
                param="n",
                code="too_many_choices",
            )
        self.check(choices)
        if (current := admission.current()) is not None:
            self.table.add_request(current)

    def _running_limit(self) -> int:
        return sum(load.max_running_requests for load in self.manager.load_snapshot_reader.read_all())

    def check(self, more: int = 1) -> None:
        """Raise ApiError while the queue is full. more: further choices.

        The schedulers publish their queue late in a burst. So the choices counted here are bounded too, by the limit
        plus the number that the schedulers run at a time.
        """
        if self.most is None:
            return
        under_way = self.table.under_way + self._entering
        if under_way + more <= self.most:
            return
        loads = self.manager.load_snapshot_reader.read_all()
        waiting = sum(load.num_waiting_reqs for load in loads)
        if waiting >= self.most or under_way + more > self._running_limit() + self.most:
            raise ApiError(
                f"the server is busy: {self.most} choices wait, as many as may; try again, or another server",
                status=429,
                code="queue_full",
            )
