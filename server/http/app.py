"""The HTTP surface, put together: the gate around the routes, with errors in one format."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI

from outrider.server.engine.engine import Engine
from outrider.server.engine.resolve import Resolved
from outrider.server.http import errors, openapi
from outrider.server.http.gate import Gate
from outrider.server.http.lifecycle import Lifecycle
from outrider.server.http.metrics import HttpMetrics
from outrider.server.http.routes import health, openai, tune
from outrider.server.http.validation import Limits


def build(
    resolved: Resolved,
    engine: Engine,
    lifecycle: Lifecycle,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]],
) -> FastAPI:
    """lifespan is entered before the first request is taken, and left after the last."""
    settings, manager = resolved.settings, engine.tokenizer_manager
    limits = Limits(
        max_body_bytes=settings.max_body_bytes,
        model=manager.served_model_name,
        vocab_size=manager.model_config.vocab_size,
        context_length=engine.context_length,
        max_choices=settings.max_choices,
        has_tool_parser=bool(manager.config_value("tool_call_parser")),
    )
    app = FastAPI(title="Outrider", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    errors.install(app)
    openai.install(app, engine, lifecycle, limits)
    health.install(app, engine, lifecycle)
    tune.install(app, resolved, engine, lifecycle, limits)
    openapi.install(app, limits, has_key=bool(settings.api_key))
    app.add_middleware(Gate, api_key=settings.api_key, lifecycle=lifecycle, metrics=HttpMetrics())
    return app
