"""Connections beyond the limit, and unfinished TLS handshakes, on both event loops."""

import asyncio
import contextlib
import json
import logging
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop
from certificates import certificate
from metrics_page import metric
from running import Server

from outrider.server.http import listen
from outrider.server.http.connections.acceptor import OpenConnections
from outrider.server.http.connections.connection import protocol
from outrider.server.http.connections.tls import Tls
from outrider.server.http.listen import bind
from outrider.server.settings.settings import Settings

LIMIT = 3
SECONDS = 1.0
ASK = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
Main = Callable[[int, OpenConnections], Coroutine[Any, Any, None]]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Serve an app that says ok, and call `main(port, connections)`; all connections must be closed in the end."""

    def serve_and_run(main: Main, tls: Tls | None = None) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(served(main, tls), 60))

    return serve_and_run


async def served(main: Main, tls: Tls | None) -> None:
    connections = OpenConnections(LIMIT)
    config = uvicorn.Config(app, log_config=None, lifespan="off", http=protocol(SECONDS))
    listener = bind("127.0.0.1", 0)
    server = listen.Server(config, connections, tls)
    task = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        await main(listener.getsockname()[1], connections)
        await until(lambda: connections.count == 0)
    finally:
        server.should_exit = True
        await task


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen in time")


@contextlib.asynccontextmanager
async def connected(port: int, **options: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def ask(port: int, **options: Any) -> tuple[int, bytes]:
    """Status and the text after the head of an answer."""
    async with connected(port, **options) as (reader, writer):
        writer.write(ASK)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return int(head.split()[1]), await reader.readexactly(int(length.partition(b":")[2]))


async def fill(stack: contextlib.AsyncExitStack, port: int, connections: OpenConnections, **options: Any) -> None:
    """Open as many connections as there may be."""
    for _ in range(LIMIT):
        await stack.enter_async_context(connected(port, **options))
    await until(lambda: connections.count == LIMIT)


def test_one_connection_too_many_is_answered_503_and_closed(run: Callable[..., None]) -> None:
    async def main(port: int, connections: OpenConnections) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await fill(stack, port, connections)
            async with connected(port) as (reader, _):
                head, _, body = (await asyncio.wait_for(reader.read(), SECONDS / 2)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"Retry-After: 1" in head
            error = json.loads(body)["error"]
            assert error["code"] == "too_many_connections"
            assert "3 connections (--max-connections)" in error["message"]
            assert connections.count == LIMIT
        await until(lambda: connections.count == 0)
        assert await ask(port) == (200, b"ok")

    run(main)


@pytest.mark.slow
def test_silent_connections_are_closed_in_time(run: Callable[..., None]) -> None:
    async def main(port: int, connections: OpenConnections) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await fill(stack, port, connections)
            await until(lambda: connections.count == 0)
            assert await ask(port) == (200, b"ok")

    run(main)


def test_a_request_to_upgrade_is_answered_normally(run: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn would hand the connection over, so that it would be counted for ever."""
    caplog.set_level(logging.WARNING)

    async def main(port: int, connections: OpenConnections) -> None:
        async with connected(port) as (reader, writer):
            writer.write(ASK.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"))
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")

    run(main)
    assert not caplog.records


Contexts = tuple[Tls, ssl.SSLContext]


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    """TLS: the server's, made from flags, and a client's context."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    crt, key = certificate(tmp_path_factory.mktemp("certificate"), "here")
    tls = Tls.of(Settings(ssl_certfile=crt, ssl_keyfile=key))
    assert tls is not None
    return tls, ssl.create_default_context(cafile=crt)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n"])
def test_an_unfinished_handshake_is_closed(run: Callable[..., None], contexts: Contexts, sent: bytes) -> None:
    tls, _ = contexts

    async def main(port: int, connections: OpenConnections) -> None:
        async with connected(port) as (reader, writer):
            writer.write(sent)
            began = asyncio.get_running_loop().time()
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 10 * SECONDS)
            assert asyncio.get_running_loop().time() - began < 9 * SECONDS
            await until(lambda: connections.count == 0)

    run(main, tls)


def test_handshakes_count_and_one_too_many_is_closed(run: Callable[..., None], contexts: Contexts) -> None:
    tls, client = contexts

    async def main(port: int, connections: OpenConnections) -> None:
        assert await ask(port, ssl=client) == (200, b"ok")
        await until(lambda: connections.count == 0)
        async with contextlib.AsyncExitStack() as stack:
            await fill(stack, port, connections)
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await ask(port, ssl=client)
        await until(lambda: connections.count == 0)
        async with contextlib.AsyncExitStack() as stack:
            await fill(stack, port, connections, ssl=client)
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await ask(port, ssl=client)

    run(main, tls)


def test_many_requests_through_tls(run: Callable[..., None], contexts: Contexts) -> None:
    tls, client = contexts

    async def main(port: int, connections: OpenConnections) -> None:
        for _ in range(20):
            answers = await asyncio.gather(*(ask(port, ssl=client) for _ in range(LIMIT)))
            assert answers == [(200, b"ok")] * LIMIT
            await until(lambda: connections.count == 0)

    run(main, tls)


LIMITS = """
import json, resource, sys
from outrider.server.errors import UserError
from outrider.server.http.connections.acceptor import connection_limit
soft, hard, wanted = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    print(json.dumps([connection_limit(wanted), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]))
except UserError as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "expected"),
    [
        (256, 1024, None, [512, 1024]),
        (256, 8192, None, [4096, 4608]),
        (8192, 8192, None, [4096, 8192]),
        (256, 8192, 100, [100, 612]),
        (256, 1024, 513, "--max-connections 513 needs 1025 open files, and this system allows 1024 (ulimit -Hn)"),
    ],
)
def test_the_limit_is_below_that_of_the_system(soft: int, hard: int, wanted: int | None, expected: Any) -> None:
    asked = json.dumps([soft, hard, wanted])
    done = subprocess.run([sys.executable, "-c", LIMITS, asked], capture_output=True, text=True, check=True)
    limits = json.loads(done.stdout)
    assert limits[: len(expected)] == expected


def test_the_metrics_count_connections(server: Server) -> None:
    with httpx.Client(base_url=server.url) as client:
        client.get("/ready")
        before = metric(server.url, "outrider_open_connections")
        with httpx.Client(base_url=server.url) as another:
            another.get("/ready")
            assert metric(server.url, "outrider_open_connections") == before + 1 >= 2
    assert metric(server.url, "outrider_refused_connections_total") == 0
