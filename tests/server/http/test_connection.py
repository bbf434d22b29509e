"""Connections with late or unfinished requests, on a real socket."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request

from outrider.server.http import errors
from outrider.server.http.connections.connection import AHEAD_BYTES, protocol

SECONDS = 0.4
HEAD = b"POST /echo HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n"
WHOLE = HEAD % 4 + b"body"


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return int(head.split()[1]), await self.reader.readexactly(int(length.partition(b":")[2]))

    async def closed(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), 10)


class Echo:
    """Answers with the body, `answer_seconds` after it came. entered, left: requests handled, and those with a client
    that left meanwhile."""

    def __init__(self) -> None:
        self.app = FastAPI()
        errors.install(self.app)
        self.answer_seconds = 0.0
        self.entered = self.left = 0

        @self.app.post("/echo")
        async def echo(request: Request) -> str:
            self.entered += 1
            body = await request.body()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.answer_seconds):
                    self.left += (await request.receive())["type"] == "http.disconnect"
            return body.decode()

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[Any]:
        config = uvicorn.Config(self.app, port=0, log_level="error", log_config=None, http=protocol(SECONDS))
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        task = asyncio.create_task(server._serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]

        async def connect() -> Client:
            return Client(*await asyncio.open_connection("127.0.0.1", port))

        try:
            yield connect
        finally:
            server.should_exit = True
            await task


@pytest.fixture
def echo() -> Echo:
    return Echo()


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"POST /ec", b"POST /echo HTTP/1.1\r\nHost: he", HEAD % 100, HEAD % 100 + b"some"])
def test_an_unfinished_request_is_answered_408(echo: Echo, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def main() -> None:
        async with echo.served() as connect:
            client = await connect()
            await client.send(sent)
            status, body = await client.answer()
            assert status == 408
            error = json.loads(body)["error"]
            assert error["code"] == "receive_timeout"
            assert "0.4 s" in error["message"]
            assert await client.closed() == b""

    run(main())
    assert not caplog.records


def test_a_silent_connection_is_closed(echo: Echo) -> None:
    async def main() -> None:
        async with echo.served() as connect:
            assert await (await connect()).closed() == b""

    run(main())


def test_slow_bytes_do_not_keep_a_connection_open(echo: Echo) -> None:
    """The time limits the whole request, head and body."""

    async def trickle(client: Client) -> None:
        with contextlib.suppress(ConnectionError):
            while not client.reader.at_eof():
                await client.send(b"x")
                await asyncio.sleep(SECONDS / 8)

    async def main() -> None:
        async with echo.served() as connect:
            for begin in (b"POST /echo", HEAD % 1000):
                client = await connect()
                await client.send(begin)
                began = asyncio.get_running_loop().time()
                trickling = asyncio.create_task(trickle(client))
                with contextlib.suppress(ConnectionError):
                    await client.closed()
                assert asyncio.get_running_loop().time() - began < 10 * SECONDS
                trickling.cancel()

    run(main())


@pytest.mark.slow
def test_whole_requests_are_answered_however_long_that_takes(echo: Echo) -> None:
    """Requests come in sequence, in pieces, pipelined, and after a pause."""
    echo.answer_seconds = 2 * SECONDS

    async def main() -> None:
        async with echo.served() as connect:
            client = await connect()
            await client.send(WHOLE)
            assert await client.answer() == (200, b'"body"')
            await asyncio.sleep(2 * SECONDS)  # between requests the keep-alive time counts
            for piece in (WHOLE[:9], WHOLE[9:-2], WHOLE[-2:]):
                await client.send(piece)
                await asyncio.sleep(SECONDS / 16)
            assert await client.answer() == (200, b'"body"')
            await client.send(WHOLE + WHOLE)
            assert await client.answer() == await client.answer() == (200, b'"body"')
            assert echo.entered == 4

    run(main())


@pytest.mark.parametrize("leaves", ["closes", "closes its side"])
@pytest.mark.parametrize("ahead", [b"", HEAD[:9], WHOLE, 3 * WHOLE], ids=["", "begun", "one", "three"])
def test_a_client_that_leaves_is_noticed_at_once(echo: Echo, leaves: str, ahead: bytes) -> None:
    """The client may have sent data ahead. Closing only the sending side after a request counts as leaving."""
    echo.answer_seconds = 60

    async def main() -> None:
        async with echo.served() as connect:
            client = await connect()
            await client.send(WHOLE)
            await asyncio.sleep(SECONDS / 8)
            await client.send(ahead)
            await asyncio.sleep(SECONDS / 8)
            assert (echo.entered, echo.left) == (1, 0)
            if leaves == "closes":
                client.writer.close()
            else:
                client.writer.write_eof()
            while not echo.left:
                await asyncio.sleep(0.01)
            if leaves == "closes its side":
                assert await client.closed() == b""
            client.writer.close()
            assert echo.entered == 1

    run(main())


@pytest.mark.slow
def test_little_is_read_ahead_of_an_answer(echo: Echo) -> None:
    echo.answer_seconds = 4 * SECONDS

    async def main() -> None:
        async with echo.served() as connect:
            client = await connect()
            await client.send(WHOLE)
            await asyncio.sleep(SECONDS / 8)
            much = b"x" * (1024 * AHEAD_BYTES)  # the system's own buffers hold a tenth
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.send(much), 2 * SECONDS)
            client.writer.transport.abort()

    run(main())


def test_a_further_request_has_a_time_of_its_own(echo: Echo) -> None:
    """Its headers may arrive during the previous answer."""

    async def main() -> None:
        async with echo.served() as connect:
            for seconds, further in ((0.0, HEAD % 9), (SECONDS, HEAD % 9), (0.0, b"POST")):
                echo.answer_seconds = seconds
                client = await connect()
                await client.send(WHOLE)
                if not seconds:
                    assert await client.answer() == (200, b'"body"')
                await client.send(further)
                if seconds:
                    assert await client.answer() == (200, b'"body"')
                assert (await client.answer())[0] == 408
                assert await client.closed() == b""

    run(main())


def test_an_early_answer_is_sent_without_waiting_for_the_rest_of_the_request(echo: Echo) -> None:
    async def main() -> None:
        async with echo.served() as connect:
            client = await connect()
            await client.send((HEAD % 100).replace(b"/echo", b"/none"))
            assert (await client.answer())[0] == 404
            assert await client.closed() == b""

    run(main())
