"""Connections beyond the limit, and unfinished TLS handshakes, on both event loops."""

import asyncio
import contextlib
import json
import logging
import resource
import shutil
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from certificates import certificate
from refusals import refuses
from served_app import Connected, say_ok, served, until

from outrider.server.http.connections.acceptor import OpenConnections, connection_limit
from outrider.server.http.connections.tls import Tls
from outrider.server.settings.settings import Settings

LIMIT = 3
SECONDS = 1.0
ASK = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
Main = Callable[[int, OpenConnections], Coroutine[Any, Any, None]]
Contexts = tuple[Tls, ssl.SSLContext]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Serve an app that says ok, and call `main(port, connections)`; all connections must be closed in the end."""

    async def serve(main: Main, tls: Tls | None) -> None:
        async with served(say_ok, SECONDS, limit=LIMIT, tls=tls) as (port, connections):
            await main(port, connections)
            await until(lambda: connections.count == 0)

    def serve_and_run(main: Main, tls: Tls | None = None) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(serve(main, tls), 60))

    return serve_and_run


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    """TLS: the server's, made from flags, and a client's context."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    crt, key = certificate(tmp_path_factory.mktemp("certificate"), "here")
    tls = Tls.of(Settings(ssl_certfile=crt, ssl_keyfile=key))
    assert tls is not None
    return tls, ssl.create_default_context(cafile=crt)


async def ask(port: int, **options: Any) -> tuple[int, bytes]:
    async with await Connected.to(port, **options) as client:
        await client.send(ASK)
        return await client.answer()


@contextlib.asynccontextmanager
async def filled(port: int, connections: OpenConnections, **options: Any) -> Any:
    """Open the most connections that are allowed."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(LIMIT):
            await stack.enter_async_context(await Connected.to(port, **options))
        await until(lambda: connections.count == LIMIT)
        yield
    await until(lambda: connections.count == 0)


def test_one_connection_too_many_is_answered_503_and_closed(run: Callable[..., None]) -> None:
    async def main(port: int, connections: OpenConnections) -> None:
        async with filled(port, connections):
            async with await Connected.to(port) as client:
                head, _, body = (await asyncio.wait_for(client.rest(), SECONDS / 2)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"Retry-After: 1" in head
            error = json.loads(body)["error"]
            assert error["code"] == "too_many_connections"
            assert "3 connections (--max-connections)" in error["message"]
            assert connections.count == LIMIT
        assert await ask(port) == (200, b"ok")

    run(main)


@pytest.mark.slow
def test_silent_connections_are_closed_in_time(run: Callable[..., None]) -> None:
    async def main(port: int, connections: OpenConnections) -> None:
        async with filled(port, connections):
            await until(lambda: connections.count == 0)
            assert await ask(port) == (200, b"ok")

    run(main)


def test_a_request_to_upgrade_is_answered_normally(run: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn would hand the connection over, so that it would be counted for ever."""
    caplog.set_level(logging.WARNING)

    async def main(port: int, connections: OpenConnections) -> None:
        async with await Connected.to(port) as client:
            await client.send(ASK.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"))
            assert await client.answer() == (200, b"ok")

    run(main)
    assert not caplog.records


@pytest.mark.slow
def test_unfinished_handshakes_are_closed(run: Callable[..., None], contexts: Contexts) -> None:
    async def closed(port: int, sent: bytes) -> None:
        async with await Connected.to(port) as client:
            await client.send(sent)
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(client.rest(), 9 * SECONDS)

    async def main(port: int, connections: OpenConnections) -> None:
        await asyncio.gather(*(closed(port, sent) for sent in (b"", b"\x16\x03\x01\x02\x00\x01", ASK)))

    run(main, contexts[0])


def test_handshakes_count_and_one_too_many_is_closed(run: Callable[..., None], contexts: Contexts) -> None:
    tls, client = contexts

    async def main(port: int, connections: OpenConnections) -> None:
        for _ in range(20):
            answers = await asyncio.gather(*(ask(port, ssl=client) for _ in range(LIMIT)))
            assert answers == [(200, b"ok")] * LIMIT
            await until(lambda: connections.count == 0)
        for options in ({}, {"ssl": client}):
            async with filled(port, connections, **options):
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    await ask(port, ssl=client)

    run(main, tls)


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "limit", "raised"),
    [
        (256, 1024, None, 512, 1024),
        (256, 8192, None, 4096, 4608),
        (8192, 8192, None, 4096, 8192),
        (256, 8192, 100, 100, 612),
        (256, resource.RLIM_INFINITY, 9000, 9000, 9512),
    ],
)
def test_the_limit_is_below_that_of_the_system(
    soft: int, hard: int, wanted: int | None, limit: int, raised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: limits.append(new))
    assert connection_limit(wanted) == limit
    assert limits[-1] == (raised, hard)
    if hard == 1024:
        refuses(r"513 needs 1025 open files, and this system allows 1024 \(ulimit -Hn\)", connection_limit, 513)
