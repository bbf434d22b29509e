"""Routes for whoever watches the server: health, readiness and metrics."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from outrider.server.engine.part import Part
from outrider.server.http import metrics, openapi
from outrider.server.http.lifecycle import Lifecycle


def install(app: FastAPI, engine: Part, lifecycle: Lifecycle) -> None:
    """Add the routes. None of them asks the engine for anything that takes its time."""

    @app.get("/health", responses={503: {"description": "a process of the engine has died"}})
    async def health() -> JSONResponse:
        dead = engine.dead_processes()
        body = {"status": "ok" if lifecycle.healthy else "failed", "dead_processes": dead}
        return JSONResponse(body, 200 if lifecycle.healthy else 503)

    @app.get("/ready", responses={503: {"description": "no requests are taken: it starts, stops or has failed"}})
    async def ready() -> JSONResponse:
        return JSONResponse({"status": lifecycle.state.value}, 200 if lifecycle.accepting else 503)


def install_metrics(app: FastAPI) -> None:
    @app.get("/metrics", responses=openapi.answers(kind="text/plain", says="Prometheus' format"))
    async def get_metrics() -> Response:
        body, content_type = await asyncio.to_thread(metrics.render)
        return Response(body, media_type=content_type)
