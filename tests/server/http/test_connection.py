"""Connections with late or unfinished requests, on a real socket."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from fastapi import FastAPI, Request
from in_loop import in_loop
from served_app import Connected, served

from outrider.server.http import errors
from outrider.server.http.connections.connection import AHEAD_BYTES

SECONDS = 0.4
HEAD = b"POST /echo HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n"
WHOLE = HEAD % 4 + b"body"
ANSWER = (200, b'"body"')


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
    async def served(self) -> AsyncIterator[Callable[[], Awaitable[Connected]]]:
        """A function that connects."""
        async with served(self.app, SECONDS) as (port, _):
            yield lambda: Connected.to(port)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.mark.slow
@in_loop
async def test_unfinished_requests_are_answered_408(echo: Echo, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with echo.served() as connect:

        async def late(sent: bytes) -> None:
            client = await connect()
            await client.send(sent)
            status, body = await client.answer()
            error = json.loads(body)["error"]
            assert (status, error["code"]) == (408, "receive_timeout")
            assert "0.4 s" in error["message"]
            assert await client.rest() == b""

        pieces = (b"POST /ec", b"POST /echo HTTP/1.1\r\nHost: he", HEAD % 100, HEAD % 100 + b"some")
        await asyncio.gather(*map(late, pieces))
    assert not caplog.records


@in_loop
async def test_slow_bytes_do_not_keep_a_connection_open(echo: Echo) -> None:
    """The time limits the whole request, head and body."""
    async with echo.served() as connect:

        async def trickle(client: Connected) -> None:
            with contextlib.suppress(ConnectionError):
                while not client.reader.at_eof():
                    await client.send(b"x")
                    await asyncio.sleep(SECONDS / 8)

        for begin in (b"POST /echo", HEAD % 1000):
            client = await connect()
            await client.send(begin)
            trickling = asyncio.create_task(trickle(client))
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(client.rest(), 10 * SECONDS)
            trickling.cancel()


@pytest.mark.slow
@in_loop
async def test_whole_requests_are_answered_however_long_that_takes(echo: Echo) -> None:
    """Requests come in sequence, in pieces, pipelined, and after a pause."""
    echo.answer_seconds = 2 * SECONDS
    async with echo.served() as connect:
        client = await connect()
        await client.send(WHOLE)
        assert await client.answer() == ANSWER
        await asyncio.sleep(2 * SECONDS)  # between requests the keep-alive time counts
        for piece in (WHOLE[:9], WHOLE[9:-2], WHOLE[-2:]):
            await client.send(piece)
            await asyncio.sleep(SECONDS / 16)
        assert await client.answer() == ANSWER
        await client.send(WHOLE + WHOLE)
        assert await client.answer() == await client.answer() == ANSWER
        assert echo.entered == 4


@pytest.mark.parametrize("leaves", ["closes", "closes its side"])
@pytest.mark.parametrize("ahead", [b"", HEAD[:9], WHOLE, 3 * WHOLE], ids=["", "begun", "one", "three"])
@in_loop
async def test_a_client_that_leaves_is_noticed_at_once(echo: Echo, leaves: str, ahead: bytes) -> None:
    """The client may have sent data ahead. Closing only the sending side after a request counts as leaving."""
    echo.answer_seconds = 60
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
            assert await client.rest() == b""
        client.writer.close()
        assert echo.entered == 1


@pytest.mark.slow
@in_loop
async def test_little_is_read_ahead_of_an_answer(echo: Echo) -> None:
    echo.answer_seconds = 4 * SECONDS
    async with echo.served() as connect:
        client = await connect()
        await client.send(WHOLE)
        await asyncio.sleep(SECONDS / 8)
        much = b"x" * (1024 * AHEAD_BYTES)  # the system's own buffers hold a tenth
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.send(much), 2 * SECONDS)
        client.writer.transport.abort()


@in_loop
async def test_a_further_request_has_a_time_of_its_own(echo: Echo) -> None:
    """Its headers may arrive during the previous answer."""
    async with echo.served() as connect:
        for seconds, further in ((0.0, HEAD % 9), (SECONDS, HEAD % 9), (0.0, b"POST")):
            echo.answer_seconds = seconds
            client = await connect()
            await client.send(WHOLE)
            if not seconds:
                assert await client.answer() == ANSWER
            await client.send(further)
            if seconds:
                assert await client.answer() == ANSWER
            assert (await client.answer())[0] == 408
            assert await client.rest() == b""


@in_loop
async def test_an_early_answer_is_sent_without_waiting_for_the_rest_of_the_request(echo: Echo) -> None:
    async with echo.served() as connect:
        client = await connect()
        await client.send((HEAD % 100).replace(b"/echo", b"/none"))
        assert (await client.answer())[0] == 404
        assert await client.rest() == b""
