"""OpenAI's routes: chat completions, completions and models."""

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from ...processes.engine import Engine
from .. import openapi
from ..answers import handlers
from ..answers.handlers import ChatHandler, TextHandler
from ..errors import ApiError
from ..keys import admission
from ..keys.queue_limit import QueueLimit
from ..lifecycle import Lifecycle
from ..requests import receive, validation
from ..requests.dialect import Dialect
from ..requests.grammar_process import GrammarProcess
from ..requests.protocol import CHAT, TEXT, ChatRequest, Kind, TextRequest
from ..requests.sampling_defaults import SamplingDefaults
from ..requests.validation import Limits

ELSEWHERE = "/v1/embeddings"
"""A route of OpenAI's that clients try and this server lacks."""
EVENTS = "where `stream` is true: server-sent events, each a piece of the answer or an error; the last says [DONE]"
EXAMPLE_QUESTION = "Explain what rain is."
"""Prompt of the examples in /docs."""

Complete = Callable[[Kind | Dialect, Request], Awaitable[tuple[ChatRequest | TextRequest, Response]]]
"""Receives a request and answers it."""


def install(
    app: FastAPI,
    engine: Engine,
    lifecycle: Lifecycle,
    limits: Limits,
    sampling: SamplingDefaults,
    queue: QueueLimit,
    compiler: GrammarProcess,
    activations: str,
) -> tuple[ChatHandler, Complete]:
    """Add the routes. activations: precision of the inputs of products with weights in blocks. Returns the handler of
    chats, and the function that answers a request of any form."""
    chat = ChatHandler(engine.tokenizer_manager, engine.template_manager, compiler, sampling)
    text = TextHandler(engine.tokenizer_manager, engine.template_manager, compiler, sampling)

    def check_accepting() -> None:
        if not lifecycle.accepting:
            raise ApiError(f"the server is {lifecycle.status}; try another", status=503, code="unavailable")

    @contextlib.contextmanager
    def entering() -> Iterator[None]:
        check_accepting()  # once more: a body takes as long as its client likes
        with queue.entering():
            yield

    async def complete(form: Kind | Dialect, raw: Request) -> tuple[ChatRequest | TextRequest, Response]:
        check_accepting()
        queue.check()
        request = await receive.receive(raw, form, limits, entering)
        n, prompts = request.n, validation.prompt_count(request)
        if (current := admission.current()) is not None:
            current.add_choices(n, prompts)
        queue.check_choices(n * prompts)
        handler = chat if isinstance(request, ChatRequest) else text
        return request, await handlers.answer(handler, request, raw)

    @app.post(
        "/v1/chat/completions",
        openapi_extra=openapi.request_body(
            ChatRequest, messages=[{"role": "user", "content": EXAMPLE_QUESTION}], max_tokens=32
        ),
        responses=openapi.responses("text/event-stream", EVENTS),
    )
    async def chat_completions(raw: Request) -> Response:
        return (await complete(CHAT, raw))[1]

    @app.post(
        "/v1/completions",
        openapi_extra=openapi.request_body(TextRequest, prompt=EXAMPLE_QUESTION, max_tokens=32),
        responses=openapi.responses("text/event-stream", EVENTS),
    )
    async def text_completions(raw: Request) -> Response:
        return (await complete(TEXT, raw))[1]

    card = {
        "object": "model",
        "created": int(time.time()),
        "owned_by": "outrider",
        "max_model_len": limits.context_length,  # as SGLang and vLLM name it
        "default_parameters": sampling.applied,  # of a request that names none, as OpenRouter names them
        "activations": activations,
    }

    def card_of(name: str) -> dict[str, Any]:
        return {"id": name, **card, "parent": None if name == limits.model else limits.model}

    @app.api_route(ELSEWHERE, methods=["GET", "POST"], include_in_schema=False)
    async def elsewhere() -> Response:
        message = "this server generates text only; ask a server of an embedding model"
        raise ApiError(message, status=404, code="unsupported_endpoint")

    @app.get("/v1/models")
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card_of(name) for name in (limits.model, *limits.adapters())]})

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> JSONResponse:
        validation.check_model(name, limits)
        return JSONResponse(card_of(name))

    return chat, complete
