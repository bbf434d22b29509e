"""OpenAI's /v1/responses, answered as a chat. Nothing is stored."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from .. import openapi
from ..answers.responses import ResponsesAnswer, ResponsesWriter
from ..answers.translated import translated
from ..requests.protocol import ChatRequest
from ..requests.responses import RESPONSES
from .openai import EXAMPLE_QUESTION, Complete

EVENTS = "where `stream` is true: OpenAI's server-sent events of a response"


def install(app: FastAPI, complete: Complete) -> None:
    """Add the route. complete: answers a request as a chat."""

    @app.post(
        "/v1/responses",
        openapi_extra=openapi.request_body(RESPONSES.model, input=EXAMPLE_QUESTION, max_output_tokens=32),
        responses=openapi.responses(ResponsesAnswer, kind="text/event-stream", text=EVENTS),
    )
    async def responses(raw: Request) -> Response:
        request, answer = await complete(RESPONSES, raw)
        assert isinstance(request, ChatRequest)
        return await translated(answer, ResponsesWriter(request._original, request), RESPONSES)
