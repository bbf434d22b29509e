"""Routes for monitoring the server: health, readiness and metrics."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from ...processes.engine_processes import EngineProcesses
from .. import metrics, openapi
from ..lifecycle import Lifecycle

RENDERING = ThreadPoolExecutor(1, thread_name_prefix="metrics")
"""Own thread, so that a scrape does not wait for work on requests."""


def install(app: FastAPI, engine: EngineProcesses, lifecycle: Lifecycle) -> None:
    """Add the routes. They take none of the engine's time."""

    @app.get("/health", responses={503: {"description": "a process of the engine has died, or its steps do not end"}})
    async def health() -> JSONResponse:
        body = {"status": "ok" if lifecycle.healthy else "failed", "dead_processes": engine.dead_processes()}
        if lifecycle.stalled and lifecycle.progress is not None:
            body |= {"status": lifecycle.status, "reason": lifecycle.progress.reason}
        return JSONResponse(body, 200 if lifecycle.healthy else 503)

    @app.get("/ready", responses={503: {"description": "no requests are taken: it starts, stops or has failed"}})
    async def ready() -> JSONResponse:
        return JSONResponse({"status": lifecycle.status}, 200 if lifecycle.ready else 503)


def install_metrics(app: FastAPI) -> None:
    @app.get("/metrics", responses=openapi.responses("text/plain", "Prometheus' format"))
    async def get_metrics() -> Response:
        body, content_type = await asyncio.get_running_loop().run_in_executor(RENDERING, metrics.render)
        return Response(body, media_type=content_type)
