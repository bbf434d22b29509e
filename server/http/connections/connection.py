"""HTTP connections with a time limit for receiving a request, headers and body together.

A client that closes the connection, or its side of it, no longer wants the answer. uvicorn alone waits for ever for the
end of headers and bodies, and for the first byte of a new connection; and while it holds back a further request, it
does not notice that the client leaves.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import ApiError

AHEAD_BYTES = 64 * 1024
"""Bytes of further requests read during an answer, at most; reading continues when it ends."""


class Connection(H11Protocol):
    """A client's connection, closed when receiving a request takes longer than `receive_seconds`.

    The time begins with the connection, or with the first byte of a further request, and ends with a request's last
    byte. Between requests uvicorn's keep-alive time counts, during an answer `--max-stall-seconds`.
    """

    receive_seconds = 30.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.on_lost: Callable[[], None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_receiving()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) <= AHEAD_BYTES:
            self.flow.resume_reading()  # uvicorn has paused it
        self._watch_receiving()

    def eof_received(self) -> None:
        self._give_up_answer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # of a further request: its headers arrived during the answer
            self._watch_receiving()

    def _should_upgrade(self) -> bool:
        return False  # uvicorn would hand the connection to another protocol, or warn of each request for one

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        if self.on_lost is not None:
            self.on_lost()
        super().connection_lost(exc)

    def _watch_receiving(self) -> None:
        if self.transport.is_closing() or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_watching()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.receive_seconds, self._time_out)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _time_out(self) -> None:
        """Close; answer 408 first if a request has begun and has no answer yet."""
        self._deadline = None
        if self.transport.is_closing():
            return
        begins = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        if begins and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            seconds = f"{self.receive_seconds:g} s (--max-receive-seconds)"
            message = f"the request did not come whole within {seconds}"
            self.transport.write(ApiError(message, status=408, code="receive_timeout").last_answer())
        self._give_up_answer()
        self.transport.close()

    def _give_up_answer(self) -> None:
        """Tell the request's handler that the client is gone."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()


def protocol(receive_seconds: float) -> type[Connection]:
    """Return the class of connections with this limit on receiving a request."""
    return type("Connection", (Connection,), {"receive_seconds": receive_seconds})
