"""Anthropic's /v1/messages, answered as a chat, and its count of a prompt's tokens."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from .. import offload, openapi
from ..answers.handlers import ChatHandler
from ..answers.messages import MessageAnswer, MessageWriter, TokenCount
from ..answers.translated import translated
from ..requests import receive
from ..requests.messages import COUNT, MESSAGES
from ..requests.protocol import ChatRequest
from ..requests.validation import Limits
from .openai import EXAMPLE_QUESTION, Complete

EVENTS = "where `stream` is true: Anthropic's server-sent events"
EXAMPLE = [{"role": "user", "content": EXAMPLE_QUESTION}]


def install(app: FastAPI, limits: Limits, chat: ChatHandler, complete: Complete) -> None:
    """Add the routes. complete: answers a request as a chat."""

    @app.post(
        "/v1/messages",
        openapi_extra=openapi.request_body(MESSAGES.model, messages=EXAMPLE, max_tokens=32),
        responses=openapi.responses(MessageAnswer, kind="text/event-stream", text=EVENTS),
    )
    async def messages(raw: Request) -> Response:
        request, answer = await complete(MESSAGES, raw)
        thinking = request._original.thinking
        writer = MessageWriter(omit_thinking=thinking is not None and thinking.display == "omitted")
        return await translated(answer, writer, MESSAGES)

    @app.post(
        "/v1/messages/count_tokens",
        openapi_extra=openapi.request_body(COUNT.model, messages=EXAMPLE),
        responses=openapi.responses(TokenCount),
    )
    async def count_tokens(raw: Request) -> JSONResponse:
        request = await receive.receive(raw, COUNT, limits)
        assert isinstance(request, ChatRequest)
        ids = await offload.run(request._body_bytes, chat.prompt_ids, request)
        return JSONResponse({"input_tokens": len(ids)})
