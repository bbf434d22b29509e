"""Lifecycle of a server: when it accepts requests, and how it ends, drained on a signal or because the engine died."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Coroutine, Iterator
from enum import Enum
from typing import Any

import uvicorn

from ..processes.engine_processes import EngineProcesses
from .progress import EngineProgress

logger = logging.getLogger(__name__)

# HTTP goes on for this long after the engine's death: probes see a 503 instead of a refused connection, and running
# requests get their errors.
LINGER_SECONDS = 3.0


class State(Enum):
    STARTING = "starting"
    UP = "ready"
    DRAINING = "stopping"
    FAILED = "failing"


class Lifecycle:
    """One server's life: STARTING, then UP, then DRAINING or FAILED.

    drain_seconds: time for running requests after a signal. lame_duck_seconds: time before that in which new requests
    are accepted while `/ready` already answers 503. progress: watches the engine; None: not watched.
    """

    def __init__(
        self,
        engine: EngineProcesses,
        drain_seconds: float,
        lame_duck_seconds: float = 0.0,
        progress: EngineProgress | None = None,
    ) -> None:
        self.engine = engine
        self.drain_seconds = drain_seconds
        self.lame_duck_seconds = lame_duck_seconds
        self._lame_duck_until = 0.0
        self.progress = progress
        self.state = State.STARTING
        self.in_flight = 0
        self.stopping = asyncio.Event()  # the engine died, or a signal stops the server
        self._last_served = time.monotonic()
        self._changed = asyncio.Event()  # a request runs, or the server stops
        self.server: uvicorn.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        return self.state is not State.FAILED and not self.engine.dead_processes() and not self.stalled

    @property
    def stalled(self) -> bool:
        """True while the engine has requests and makes no progress."""
        return self.progress is not None and self.progress.stalled is not None

    @property
    def status(self) -> str:
        return "stalled" if self.stalled else self.state.value

    @property
    def ready(self) -> bool:
        """True while balancers should send requests here: `/ready`."""
        return self.state is State.UP and self.healthy

    @property
    def accepting(self) -> bool:
        """True while new requests are accepted, also in the lame-duck time."""
        return self.ready or (self._lame_duck and self.healthy)

    @property
    def _lame_duck(self) -> bool:
        return self.state is State.DRAINING and time.monotonic() < self._lame_duck_until

    @property
    def exit_code(self) -> int:
        return 1 if self.state in (State.FAILED, State.STARTING) else 0

    def begin(self) -> None:
        """Install signal handlers and watch the engine; called in the running event loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal)
        # An engine process that catches its own failure sends this signal.
        loop.add_signal_handler(signal.SIGQUIT, self.fail, "the engine reported a failure")
        self._watcher = self.run(self._watch())

    def end(self) -> None:
        """Stop watching the engine, and ask it to exit if it is healthy. Called after the last answer."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self.healthy:
            self.engine.ask_to_exit()

    def up(self) -> None:
        if self.state is State.STARTING:
            self.state = State.UP

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count a request that has come whole, until its answer ends."""
        self.in_flight += 1
        self._changed.set()
        try:
            yield
        finally:
            self.in_flight -= 1
            self._last_served = time.monotonic()

    @property
    def idle(self) -> bool:
        """True if requests are accepted and none runs."""
        return self.state is State.UP and not self.in_flight

    async def wait_until_quiet(self, seconds: float) -> None:
        """Return when the server has been idle for `seconds`; never, once the server stops."""
        while not (self.idle and time.monotonic() - self._last_served >= seconds):
            await asyncio.sleep(0.5)

    async def wait_for_request(self) -> None:
        """Return when a request runs, or the server stops."""
        while self.idle:
            self._changed.clear()
            await self._changed.wait()

    def fail(self, reason: str) -> None:
        """End running requests with errors, and then the server: the engine is lost."""
        if self.state is State.FAILED:
            return
        starting = self.state is State.STARTING
        self.state = State.FAILED
        self.stopping.set()
        self._changed.set()
        if starting:  # this error ends the wait for the engine's first answer
            self.engine.fail_requests(reason)
            return
        logger.error("%s; stopping", reason)
        self.engine.fail_requests(f"{reason}; the server is restarting")
        self.run(self._linger())

    def _on_stop_signal(self) -> None:
        if self.state is State.DRAINING:
            logger.warning("second signal: stopping now, %d requests are cut off", self.in_flight)
            self.drain_seconds = self._lame_duck_until = 0
        elif self.state is not State.FAILED:
            self.state = State.DRAINING
            self._lame_duck_until = time.monotonic() + self.lame_duck_seconds
            self.stopping.set()
            self._changed.set()
            self.run(self._drain())

    async def _drain(self) -> None:
        logger.warning("stopping; %d requests are under way", self.in_flight)
        while self._lame_duck:
            await asyncio.sleep(0.05)
        begun = time.monotonic()
        while self.in_flight and time.monotonic() - begun < self.drain_seconds:
            await asyncio.sleep(0.05)
        if self.in_flight:
            self.engine.abort_requests()
            self.engine.fail_requests("the server is stopping")
            await asyncio.sleep(0.2)
        self.stop_http()

    async def _watch(self) -> None:
        names = await self.engine.wait_for_death()
        self.fail(f"{' and '.join(names)} died")

    async def _linger(self) -> None:
        await asyncio.sleep(LINGER_SECONDS)
        self.stop_http()

    def stop_http(self) -> None:
        """End the server once its answers have ended."""
        if self.server is not None:
            self.server.should_exit = True

    def run(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task that the server keeps alive."""
        # The loop keeps only weak references to tasks.
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
