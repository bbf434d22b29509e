"""Accept connections up to a limit, with a time limit on TLS handshakes.

uvicorn accepts any number of connections, and does not see them before the handshake ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...errors import UserError
from ..errors import ApiError
from .connection import Connection

if TYPE_CHECKING:
    from ..metrics import ConnectionMetrics
    from .tls import Tls

logger = logging.getLogger(__name__)

DEFAULT_CONNECTIONS = 4096
RESERVED_FILES = 512
"""Open files kept free of clients' connections: for the engine's sockets, metrics, the metrics port."""
METRICS_CONNECTIONS = 128
"""Most connections to the metrics port at a time; they are among the reserved files."""
BACKLOG = 2048
"""Connections that the system keeps until they are accepted."""
RETRY_SECONDS = 0.1
"""Pause after the system could not accept a connection, for lack of open files or memory."""


def connection_limit(wanted: int | None) -> int:
    """Return the number of connections that a server accepts at a time, below the system's limit on open files.

    wanted: `--max-connections`. Increases this process's limit on open files where needed. Raises UserError if the
    system does not allow that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    bounded = hard != resource.RLIM_INFINITY
    room = max(1, hard - RESERVED_FILES)
    if wanted is not None and bounded and wanted > room:
        raise UserError(
            f"--max-connections {wanted} needs {wanted + RESERVED_FILES} open files, and this system allows {hard}"
            f" (ulimit -Hn); ask for {room} at most, or raise that limit"
        )
    limit = wanted or (min(DEFAULT_CONNECTIONS, room) if bounded else DEFAULT_CONNECTIONS)
    files = min(limit + RESERVED_FILES, hard) if bounded else limit + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return limit


class OpenConnections:
    """Connections to one port, counted from their acceptance to their end.

    limit: most at a time. counts: metrics of them.
    """

    def __init__(self, limit: int, counts: ConnectionMetrics | None = None) -> None:
        self.limit = limit
        self.count = 0
        self._counts = counts

    def enter(self) -> Callable[[], None] | None:
        """Count a connection. Returns a function that counts its end, once; None if the limit is reached."""
        if self.count >= self.limit:
            if self._counts is not None:
                self._counts.refused.inc()
            return None
        self._change(1)
        left = contextlib.ExitStack()
        left.callback(self._change, -1)
        return left.close

    def refusal(self) -> bytes:
        """Return the answer to a connection beyond the limit."""
        message = f"this server has its {self.limit} connections (--max-connections); try again"
        return ApiError(message, status=503, code="too_many_connections").last_answer()

    def _change(self, by: int) -> None:
        self.count += by
        if self._counts is not None:
            self._counts.open.inc(by)


class Acceptor:
    """Accepts a socket's connections until it is closed; for uvicorn, in place of asyncio's server.

    protocol_factory: makes a connection's protocol. A connection beyond the limit gets 503 and is closed at once; with
    TLS it is closed without an answer. tls: a handshake may take as long as receiving a request.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol_factory: Callable[[], Connection],
        connections: OpenConnections,
        tls: Tls | None,
    ) -> None:
        self.sockets = (listener,)
        self._protocol_factory, self._connections, self._tls = protocol_factory, connections, tls
        self._tasks: set[asyncio.Task[None]] = set()
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listener))

    def close(self) -> None:
        """Stop accepting; open connections stay."""
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        await asyncio.wait({self._accepting})

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError as error:
                logger.warning("a connection could not be accepted: %s", error.strerror or error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if (leave := self._connections.enter()) is None:
                self._refuse(client)
            else:
                task = loop.create_task(self._serve(client, leave))
                self._tasks.add(task)  # the loop has only weak references to tasks
                task.add_done_callback(self._tasks.discard)

    def _refuse(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            if self._tls is None:
                client.send(self._connections.refusal())

    async def _serve(self, client: socket.socket, leave: Callable[[], None]) -> None:
        """Make the socket's connection; with TLS, after the handshake."""
        connection = self._protocol_factory()
        connection.on_lost = leave
        context, seconds = (self._tls.context, connection.receive_seconds) if self._tls else (None, None)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, client, ssl=context, ssl_handshake_timeout=seconds
            )
        except (OSError, TimeoutError):  # the handshake failed or took too long, or the client left
            leave()
