"""Bind the server's sockets, and run uvicorn on them until the last request is answered."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn

from ..errors import UserError
from ..plugin import worker_rpc
from ..processes import client
from ..processes.engine import Engine
from ..processes.process import quick_imports
from ..settings.resolve import Resolved
from ..settings.settings import Settings
from .connections.acceptor import METRICS_CONNECTIONS, Acceptor, OpenConnections, connection_limit
from .connections.connection import Connection, protocol
from .connections.hosts import AllowedHosts
from .connections.tls import Tls
from .keys import key_file, usage_file
from .lifecycle import Lifecycle, State
from .progress import EngineProgress

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ..processes.engine_processes import EngineProcesses
    from .app import Lifespan
    from .keys.access import Access
    from .request_middleware import RequestMiddleware

SAVE_SECONDS = 5.0
"""Time that the engine has to save lookup texts and answers before it ends."""


def bind(host: str, port: int, flag: str = "--port", host_flag: str = "--host") -> socket.socket:
    """Bind a socket, without listening yet. Raises UserError, which names a flag, if that fails."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        raise UserError(f"{host_flag} {host} is not an address of this machine") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except PermissionError:
        raise UserError(f"port {port} needs more rights; choose one from 1024 on with {flag}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} on {host} is in use; choose another with {flag}") from None
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    os.register_at_fork(after_in_child=listener.close)  # a child that kept it would keep the port open after us
    return listener


@dataclass(frozen=True, slots=True)
class Listeners:
    """The server's sockets.

    metrics: a socket for metrics alone. max_connections: connections to `requests` at a time.
    """

    requests: socket.socket
    metrics: socket.socket | None
    tls: Tls | None
    max_connections: int

    @classmethod
    def open(cls, settings: Settings) -> Listeners:
        """Check the files of keys, usage and TLS, and bind the sockets without listening yet. Raises UserError."""
        if settings.api_keys is not None:
            key_file.read(settings.api_keys)
        if settings.usage_file is not None:
            usage_file.read(settings.usage_file)
        tls, most = Tls.of(settings), connection_limit(settings.max_connections)
        requests, metrics = bind(settings.host, settings.port), None
        # The system closes a connection if its client reads no data for this long.
        requests.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * settings.max_stall_seconds))
        if settings.metrics_port is not None:
            metrics = bind(settings.metrics_host, settings.metrics_port, "--metrics-port", "--metrics-host")
        return cls(requests, metrics, tls, most)

    def hosts(self, settings: Settings) -> tuple[AllowedHosts, AllowedHosts]:
        """Return the allowed hosts of the port for requests, and of the metrics port, which needs no key."""
        key_required = settings.api_key is not None or settings.api_keys is not None
        requests = AllowedHosts.of(settings, self.requests, host=settings.host, key_required=key_required)
        if self.metrics is None:
            return requests, requests
        return requests, AllowedHosts.of(settings, self.metrics, host=settings.metrics_host, key_required=False)


def run(
    resolved: Resolved,
    processes: EngineProcesses,
    listeners: Listeners,
    access: Access,
    lifecycle: Lifecycle,
    build: Callable[[AllowedHosts, Lifespan], RequestMiddleware],
    answering: Lifespan,
) -> int:
    """Listen until the lifecycle ends; return the exit code.

    build: makes the app of the port for requests. answering: entered before the first request and left after the last;
    it brings the lifecycle up.
    """
    from .app import build_for_metrics
    from .metrics import ConnectionMetrics

    settings, tls = resolved.settings, listeners.tls
    hosts, metrics_hosts = listeners.hosts(settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with answering(app):
            if lifecycle.accepting:  # no signal has come meanwhile
                lifecycle.run(access.watch())
                if tls is not None:
                    lifecycle.run(tls.watch())
                if listeners.metrics is not None:
                    lifecycle.run(metrics.serve([listeners.metrics]))
            yield
        lifecycle.end()
        metrics.should_exit = True

    plain: dict[str, Any] = {
        "http": protocol(settings.max_receive_seconds),
        "log_config": None,  # log like all other parts
        "server_header": False,
    }
    config = uvicorn.Config(
        build(hosts, lifespan),
        log_level=settings.log_level,
        access_log=settings.log_level in ("debug", "info"),
        loop="uvloop",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=30,
        **plain,
    )
    server = Server(config, OpenConnections(listeners.max_connections, ConnectionMetrics()), tls)
    app = build_for_metrics(processes, lifecycle, metrics_hosts)
    metrics = Server(
        uvicorn.Config(app, log_level="error", access_log=False, **plain), OpenConnections(METRICS_CONNECTIONS)
    )
    lifecycle.server = server
    server.run(sockets=[listeners.requests])
    return lifecycle.exit_code


def serve(
    resolved: Resolved,
    engine: Engine,
    listeners: Listeners,
    before_first: Callable[[], Awaitable[None]],
    beside: Callable[[Lifecycle], Coroutine[Any, Any, None]],
) -> int:
    """Answer requests until a signal, or until the engine dies; the return value is the exit code.

    before_first: awaited once the engine has answered, before the first request. beside: runs while requests are
    accepted; learning begins after it. Raises UserError if the engine does not answer.
    """
    # These import SGLang, which reads the environment that the engine was started with.
    with quick_imports():
        from . import app, event_loop, offload
        from .adapters import Adapters
        from .keys.access import Access
        from .keys.token_limits import ServerClock, day_of
        from .keys.usage_file import UsageFile
        from .learning import Learning
        from .owner_learning import AdapterLearning, KeyLearning

    settings = resolved.settings
    usage, clock = UsageFile.of(settings), ServerClock()
    used = usage.used_on(day_of(clock())) if usage is not None else {}
    access = Access(settings.api_key, settings.api_keys, clock=clock, used=used)
    progress = EngineProgress(engine.tokenizer_manager, settings.max_step_seconds)
    lifecycle = Lifecycle(engine, settings.drain_seconds, settings.lame_duck_seconds, progress)
    learning: Learning | None = None
    loaded = Adapters(resolved, engine.tokenizer_manager)
    served = settings, engine.tokenizer_manager, lifecycle
    if settings.learn_per == "key":
        learning = KeyLearning(*served, access=access)
    elif settings.learn_per == "adapter":
        learning = AdapterLearning(*served, adapters=loaded)
    elif settings.learn:
        learning = Learning(*served)
    failure: str | None = None

    async def in_idle_time() -> None:
        await beside(lifecycle)
        if learning is not None:
            await learning.run()

    @contextlib.asynccontextmanager
    async def answering(app: FastAPI) -> AsyncIterator[None]:
        nonlocal failure
        try:
            await _begin(engine, lifecycle, answer_tokens=2 * settings.gamma)
            await _until_stopping(lifecycle, before_first())
            offload.freeze_loaded_objects()
            lifecycle.up()
            if lifecycle.accepting:
                lifecycle.run(in_idle_time())
                lifecycle.run(app.state.compiler.begin())
                lifecycle.run(progress.watch())
                if usage is not None:
                    lifecycle.run(usage.keep(access))
                lifecycle.run(event_loop.EventLoopWatchdog().watch())
        except Exception as error:
            failure = engine.report.read() or str(error) or repr(error)
            lifecycle.stop_http()
        yield
        if (settings.lookup_store is not None or settings.learn) and lifecycle.healthy:
            with contextlib.suppress(TimeoutError, worker_rpc.EngineFailed):
                async with asyncio.timeout(SAVE_SECONDS):
                    await worker_rpc.command(engine.tokenizer_manager, worker_rpc.SAVE)

    def build(hosts: AllowedHosts, lifespan: Lifespan) -> RequestMiddleware:
        return app.build(resolved, engine, lifecycle, access, hosts, lifespan, learning, loaded)

    offload.shorten_switch_interval()
    try:
        exit_code = run(resolved, engine, listeners, access, lifecycle, build, answering)
    finally:
        if usage is not None:
            usage.close(access)
    if failure is not None:
        raise UserError(f"the engine was loaded but cannot answer: {failure}")
    return exit_code


async def _until_stopping(lifecycle: Lifecycle, work: Awaitable[None]) -> None:
    """Wait for `work`, a request to the engine; cancel it when a signal stops the server. Raises RuntimeError if the
    engine dies."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(lifecycle.stopping.wait())
    await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    if working.done():
        await working
        return
    working.cancel()
    if lifecycle.state is State.FAILED:
        raise RuntimeError("it died")


class Server(uvicorn.Server):
    """uvicorn with a limit on connections. tls: None for plain HTTP.

    config.http is a class of `connection.protocol`.
    """

    def __init__(self, config: uvicorn.Config, connections: OpenConnections, tls: Tls | None = None) -> None:
        super().__init__(config)
        self._connections, self._tls = connections, tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self.servers: list[Any] = [
            Acceptor(listener, self._connection, self._connections, self._tls) for listener in sockets or ()
        ]

    def _connection(self) -> Connection:
        connection: Connection = self.config.http_protocol_class(  # type: ignore[call-arg, assignment]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return connection

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # The lifecycle handles signals: uvicorn would stop listening at once, and refuse connections while draining.
        yield


async def _begin(engine: Engine, lifecycle: Lifecycle, answer_tokens: int) -> None:
    """Begin to receive from the engine, and have it answer once, as a test and to warm it up."""
    engine.begin()
    # After `engine.begin`, which installs SGLang's signal handlers: ours replace them.
    lifecycle.begin()
    await client.generate(engine.tokenizer_manager, "1 2 3 1 2 3 1 2", temperature=0.0, max_new_tokens=answer_tokens)
    engine.report.started()
