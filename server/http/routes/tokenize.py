"""/v1/tokenize and /v1/detokenize, with SGLang's fields."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from sglang.srt.entrypoints.openai.protocol import DetokenizeRequest, TokenizeRequest

from .. import offload, openapi
from ..answers.handlers import ChatHandler
from ..errors import ApiError, invalid_value
from ..requests import receive
from ..requests.dialect import Dialect, Translated
from ..requests.protocol import ChatRequest, Kind, TextRequest
from ..requests.validation import Limits
from .openai import EXAMPLE_QUESTION

PROMPT_FIELDS = frozenset(
    [
        *("model", "messages", "tools", "tool_choice", "reasoning_effort", "chat_template_kwargs"),
        *("continue_final_message", "add_generation_prompt"),
    ]
)
"""Fields of a chat that its prompt depends on."""
CHAT_PROMPT = Kind(ChatRequest, PROMPT_FIELDS)
TEXT_PROMPT = Kind(TextRequest, frozenset(("model", "prompt", "add_special_tokens")))
TOKENS = Kind(TextRequest, frozenset(("model", "prompt", "skip_special_tokens")), ids=True)


def _to_prompt(body: dict[str, Any]) -> Translated:
    if ("prompt" in body) is ("messages" in body):
        raise invalid_value("prompt", "send either 'prompt' or 'messages'")
    if "messages" in body:
        if "add_special_tokens" in body:
            raise invalid_value("add_special_tokens", "'add_special_tokens' is for 'prompt'; a template adds its own")
        return Translated(CHAT_PROMPT, body)
    for name in body.keys() - TEXT_PROMPT.fields:
        raise invalid_value(name, f"{name!r} is for 'messages'")
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ApiError("'prompt' is a string or an array of strings", param="prompt", code="invalid_type")
    return Translated(TEXT_PROMPT, body)


def _to_ids(body: dict[str, Any]) -> Translated:
    tokens = body.pop("tokens", None)
    if tokens is None:
        raise ApiError("'tokens' is required", param="tokens", code="missing_required_parameter")
    if not isinstance(tokens, list) or any(isinstance(token, str) for token in tokens):
        raise ApiError("'tokens' is an array of token ids, or an array of such", param="tokens", code="invalid_type")
    return Translated(TOKENS, body | {"prompt": tokens})


TOKENIZE = Dialect(TokenizeRequest, PROMPT_FIELDS, _to_prompt, {})
DETOKENIZE = Dialect(DetokenizeRequest, frozenset(("model",)), _to_ids, {"prompt": "tokens"}, ids=True)


def install(app: FastAPI, limits: Limits, chat: ChatHandler) -> None:
    """Add the routes. chat: renders messages."""
    tokenizer = chat.tokenizer_manager.tokenizer

    def tokenized(request: ChatRequest | TextRequest) -> dict[str, Any]:
        if isinstance(request, ChatRequest):
            ids: Any = chat.prompt_ids(request)
        else:
            prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
            ids = [tokenizer.encode(one, add_special_tokens=request.add_special_tokens) for one in prompts]
            if isinstance(request.prompt, str):
                ids = ids[0]
        count = [len(one) for one in ids] if ids and isinstance(ids[0], list) else len(ids)
        return {"tokens": ids, "count": count, "max_model_len": limits.context_length}

    def detokenized(request: TextRequest) -> dict[str, Any]:
        several: Any = request.prompt if isinstance(request.prompt[0], list) else [request.prompt]
        texts = [tokenizer.decode(ids, skip_special_tokens=request.skip_special_tokens) for ids in several]
        return {"text": texts if several is request.prompt else texts[0]}

    @app.post("/v1/tokenize", openapi_extra=openapi.request_body(TokenizeRequest, prompt=EXAMPLE_QUESTION))
    async def tokenize(raw: Request) -> JSONResponse:
        request = await receive.receive(raw, TOKENIZE, limits)
        return JSONResponse(await offload.run(request._body_bytes, tokenized, request))

    @app.post("/v1/detokenize", openapi_extra=openapi.request_body(DetokenizeRequest, tokens=[1, 2, 3]))
    async def detokenize(raw: Request) -> JSONResponse:
        request = await receive.receive(raw, DETOKENIZE, limits)
        assert isinstance(request, TextRequest)
        return JSONResponse(await offload.run(request._body_bytes, detokenized, request))
