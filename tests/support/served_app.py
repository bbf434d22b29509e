"""Our HTTP server around an ASGI app, and clients that write bytes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import uvicorn

from outrider.server.http.connections.acceptor import OpenConnections
from outrider.server.http.connections.connection import protocol
from outrider.server.http.connections.tls import Tls
from outrider.server.http.listen import Server, bind


async def say_ok(scope: Any, receive: Any, send: Any) -> None:
    """An app that answers every request with "ok"."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def server_of(app: Any, receive_seconds: float, limit: int, tls: Tls | None) -> Server:
    config = uvicorn.Config(app, log_config=None, lifespan="off", http=protocol(receive_seconds))
    return Server(config, OpenConnections(limit), tls)


@contextlib.asynccontextmanager
async def served(
    app: Any, receive_seconds: float, *, limit: int = 64, tls: Tls | None = None
) -> AsyncIterator[tuple[int, OpenConnections]]:
    """Port and connections of a server in this event loop."""
    listener, server = bind("127.0.0.1", 0), server_of(app, receive_seconds, limit, tls)
    task = asyncio.create_task(server.serve([listener]))
    await until(lambda: server.started)
    try:
        yield listener.getsockname()[1], server._connections
    finally:
        server.should_exit = True
        await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


class Connected:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, port: int, **options: Any) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port, **options))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Status and body."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return int(head.split()[1]), await self.reader.readexactly(int(length.partition(b":")[2]))

    async def rest(self) -> bytes:
        """Return the bytes that arrive until the server closes the connection."""
        return await asyncio.wait_for(self.reader.read(), 10)
