"""HTTP server of a worker node, which computes a part of a model for node 0: probes and metrics.

Its processes follow node 0's processes and end with them.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

from fastapi import FastAPI

from ..processes.engine_processes import EngineProcesses
from ..settings.resolve import Resolved
from . import app as whole
from . import listen
from .connections.hosts import AllowedHosts
from .errors import ApiError
from .keys.access import Access
from .keys.auth import AuthMiddleware
from .lifecycle import Lifecycle, State
from .listen import Listeners
from .request_middleware import RequestMiddleware
from .routes import health

logger = logging.getLogger(__name__)
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


class WorkerNodeLifecycle(Lifecycle):
    """After a signal, waits `drain_seconds` at most for node 0 to end the engine on all nodes."""

    async def _drain(self) -> None:
        logger.warning("stopping with node 0, in %g s at the latest", self.drain_seconds)
        begun = time.monotonic()
        while not self.engine.dead_processes() and time.monotonic() - begun < self.drain_seconds:
            await asyncio.sleep(0.05)
        self.stop_http()

    async def _watch(self) -> None:
        names = await self.engine.wait_for_death()
        if self.state is State.UP and not self.engine.exited_cleanly():
            self.fail(f"{' and '.join(names)} died: another node is gone, or this one failed")
        elif self.state is State.UP:
            logger.warning("node 0 has ended; stopping")
            self.state = State.DRAINING
            self.stop_http()


def serve(resolved: Resolved, processes: EngineProcesses, listeners: Listeners) -> int:
    """Answer probes until a signal, the end of node 0, or a process's death; return the exit code."""
    settings = resolved.settings
    access = Access(settings.api_key, settings.api_keys)
    life = WorkerNodeLifecycle(processes, settings.drain_seconds)

    @contextlib.asynccontextmanager
    async def answering(app: FastAPI) -> AsyncIterator[None]:
        life.begin()
        life.up()
        yield

    def build(hosts: AllowedHosts, lifespan: whole.Lifespan) -> RequestMiddleware:
        app = whole.bare(lifespan)
        health.install(app, processes, life)
        if settings.metrics_port is None:
            health.install_metrics(app)

        @app.api_route("/{path:path}", methods=METHODS)
        async def elsewhere(path: str) -> None:
            parallel = settings.parallel
            raise ApiError(f"this is node {parallel.node_rank} of {parallel.nnodes}: node 0 takes requests", status=404)

        app.add_middleware(AuthMiddleware, access=access, lifecycle=life)
        return whole.guarded(app, settings, settings.served_model_name or resolved.model.name, hosts)

    return listen.run(resolved, processes, listeners, access, life, build, answering)
