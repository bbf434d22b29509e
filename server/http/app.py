"""The HTTP surface: OpenAI's routes on SGLang's handlers, health, readiness and metrics."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.server.engine.engine import Engine
from outrider.server.engine.resolve import Resolved
from outrider.server.http import errors, grammars, handlers, requests, validation
from outrider.server.http.errors import ApiError
from outrider.server.http.lifecycle import Lifecycle
from outrider.server.http.metrics import HttpMetrics, render
from outrider.server.http.protocol import CHAT, TEXT, Kind
from outrider.server.http.routes import tune

# Probes carry no key.
OPEN_PATHS = frozenset({"/health", "/ready"})


def build(
    resolved: Resolved,
    engine: Engine,
    lifecycle: Lifecycle,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]],
) -> FastAPI:
    """lifespan is entered before the first request is taken, and left after the last."""
    settings, manager = resolved.settings, engine.tokenizer_manager
    created = int(time.time())
    limits = validation.Limits(
        model=manager.served_model_name,
        vocab_size=manager.model_config.vocab_size,
        context_length=engine.context_length,
        max_choices=settings.max_choices,
        has_tool_parser=bool(manager.config_value("tool_call_parser")),
    )
    chat = handlers.ChatHandler(manager, engine.template_manager)
    text = handlers.TextHandler(manager, engine.template_manager)
    metrics = HttpMetrics()

    app = FastAPI(title="Outrider", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    errors.install(app)

    async def complete(kind: Kind, handler: Any, raw: Request) -> Response:
        if not lifecycle.accepting:
            raise ApiError(f"the server is {lifecycle.state.value}; try another", status=503, code="unavailable")
        data = await requests.read_body(raw, settings.max_body_bytes)
        request = requests.parse(kind, data)
        handlers.take_headers(request, raw)
        validation.check(request, limits)
        # Off the event loop: a large grammar must not hold up the streams of others.
        await asyncio.to_thread(grammars.check, request)
        return await handlers.answer(handler, request, raw)

    @app.post("/v1/chat/completions")
    async def chat_completions(raw: Request) -> Response:
        return await complete(CHAT, chat, raw)

    @app.post("/v1/completions")
    async def text_completions(raw: Request) -> Response:
        return await complete(TEXT, text, raw)

    card = {
        "id": limits.model,
        "object": "model",
        "created": created,
        "owned_by": "outrider",
        "max_model_len": limits.context_length,
    }

    @app.get("/v1/models")
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> JSONResponse:
        if name != limits.model:
            raise ApiError(f"model {name!r} is not served here", status=404, param="model", code="model_not_found")
        return JSONResponse(card)

    @app.get("/health")
    async def health() -> JSONResponse:
        dead = engine.dead_processes()
        body = {"status": "ok" if lifecycle.healthy else "failed", "dead_processes": dead}
        return JSONResponse(body, 200 if lifecycle.healthy else 503)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        return JSONResponse({"status": lifecycle.state.value}, 200 if lifecycle.accepting else 503)

    @app.get("/metrics")
    async def get_metrics() -> Response:
        body, content_type = await asyncio.to_thread(render)
        return Response(body, media_type=content_type)

    tune.install(app, resolved, engine, lifecycle)
    app.add_middleware(_Gate, api_key=settings.api_key, lifecycle=lifecycle, metrics=metrics)
    return app


class _Gate:
    """Around every request: asks for the key, counts. Plain ASGI, so that streams and disconnects pass unbuffered."""

    def __init__(self, app: ASGIApp, api_key: str | None, lifecycle: Lifecycle, metrics: HttpMetrics) -> None:
        self.app = app
        self.expected = f"Bearer {api_key}".encode() if api_key else None
        self.lifecycle = lifecycle
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        if not self._allowed(scope):
            refusal = ApiError(
                "wrong or missing API key; send 'Authorization: Bearer KEY' (only /health and /ready need none)",
                status=401,
                code="invalid_api_key",
            )
            await refusal.response()(scope, receive, send)
            self.metrics.finished(path, 401)
            return
        status = 500

        async def watching_send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if scope["method"] == "POST":
                async with self.lifecycle.request():
                    await self.app(scope, receive, watching_send)
            else:
                await self.app(scope, receive, watching_send)
        finally:
            self.metrics.finished(path, status)

    def _allowed(self, scope: Scope) -> bool:
        if self.expected is None or scope["path"] in OPEN_PATHS:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        # In constant time, so that a wrong key tells nothing about the right one.
        return hmac.compare_digest(given, self.expected)
