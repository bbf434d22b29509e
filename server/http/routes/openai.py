"""OpenAI's routes: chat completions, completions and models."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from outrider.server.engine.engine import Engine
from outrider.server.http import handlers, requests
from outrider.server.http.errors import ApiError
from outrider.server.http.handlers import ChatHandler, TextHandler
from outrider.server.http.lifecycle import Lifecycle
from outrider.server.http.protocol import CHAT, TEXT, Kind
from outrider.server.http.validation import Limits


def install(app: FastAPI, engine: Engine, lifecycle: Lifecycle, limits: Limits) -> None:
    """Add the routes; limits.model is the one model that they know."""
    chat = ChatHandler(engine.tokenizer_manager, engine.template_manager)
    text = TextHandler(engine.tokenizer_manager, engine.template_manager)

    async def complete(kind: Kind, handler: ChatHandler | TextHandler, raw: Request) -> Response:
        if not lifecycle.accepting:
            raise ApiError(f"the server is {lifecycle.state.value}; try another", status=503, code="unavailable")
        return await handlers.answer(handler, await requests.receive(raw, kind, limits), raw)

    @app.post("/v1/chat/completions")
    async def chat_completions(raw: Request) -> Response:
        return await complete(CHAT, chat, raw)

    @app.post("/v1/completions")
    async def text_completions(raw: Request) -> Response:
        return await complete(TEXT, text, raw)

    card = {
        "id": limits.model,
        "object": "model",
        "created": int(time.time()),
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
