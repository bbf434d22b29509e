"""Other APIs' routes, answered as chats: Anthropic's /v1/messages, with its count of a prompt's tokens, and OpenAI's
/v1/responses, which stores no answers."""

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from .. import offload, openapi
from ..answers.handlers import ChatHandler
from ..answers.messages import MessageWriter
from ..answers.responses import ResponsesWriter
from ..answers.translated import translated
from ..requests import receive
from ..requests.messages import COUNT, MESSAGES
from ..requests.protocol import ChatRequest
from ..requests.responses import RESPONSES
from ..requests.validation import Limits
from .openai import EXAMPLE_QUESTION, Complete

EVENTS = "where `stream` is true: server-sent events of this API"
EXAMPLE = [{"role": "user", "content": EXAMPLE_QUESTION}]


def install(app: FastAPI, limits: Limits, chat: ChatHandler, complete: Complete) -> None:
    """Add the routes. complete: answers a request as a chat."""

    @app.post(
        "/v1/messages",
        openapi_extra=openapi.request_body(MESSAGES.model, messages=EXAMPLE, max_tokens=32),
        responses=openapi.responses("text/event-stream", EVENTS),
    )
    async def messages(raw: Request) -> Response:
        request, answer = await complete(MESSAGES, raw)
        thinking = request._original.thinking
        writer = MessageWriter(omit_thinking=thinking is not None and thinking.display == "omitted")
        return await translated(answer, writer, MESSAGES)

    @app.post("/v1/messages/count_tokens", openapi_extra=openapi.request_body(COUNT.model, messages=EXAMPLE))
    async def count_tokens(raw: Request) -> JSONResponse:
        request = await receive.receive(raw, COUNT, limits)
        assert isinstance(request, ChatRequest)
        ids = await offload.run(request._body_bytes, chat.prompt_ids, request)
        return JSONResponse({"input_tokens": len(ids)})

    @app.post(
        "/v1/responses",
        openapi_extra=openapi.request_body(RESPONSES.model, input=EXAMPLE_QUESTION, max_output_tokens=32),
        responses=openapi.responses("text/event-stream", EVENTS),
    )
    async def responses(raw: Request) -> Response:
        request, answer = await complete(RESPONSES, raw)
        assert isinstance(request, ChatRequest)
        return await translated(answer, ResponsesWriter(request._original, request), RESPONSES)
