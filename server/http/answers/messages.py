"""Answers of Anthropic's /v1/messages."""

from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson
from pydantic_core import from_json
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import request_middleware
from .blocks import Block, BlockStep
from .translated import End, Event

PATHS = ("/v1/messages", "/v1/messages/count_tokens")
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES: dict[int, str] = {
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
"""Anthropic's names that differ from OpenAI's, by status; `server_error` is `api_error`."""
DELTAS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
CALL_DELTA = ("input_json_delta", "partial_json")


class MessageWriter:
    """Writes an answer of /v1/messages. omit_thinking: leave blocks of thinking empty."""

    begins_with_usage = True

    def __init__(self, *, omit_thinking: bool) -> None:
        self._omit_thinking = omit_thinking
        self._content: list[Block] = []
        self._message: dict[str, Any] = {}

    def begin(self, chat: dict[str, Any]) -> Iterator[Event]:
        self._message = {
            "id": f"msg_{chat['id']}",
            "type": "message",
            "role": "assistant",
            "model": chat["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(chat["usage"]) | {"output_tokens": 0},
        }
        yield {"type": "message_start", "message": self._message}

    def step(self, step: BlockStep) -> Iterator[Event]:
        block = step.block
        if step.change == "begin":
            self._content.append(block)
            yield {"type": "content_block_start", "index": block.index, "content_block": _content(block, empty=True)}
        elif step.change == "grow":
            if self._omits(block):
                return
            kind, name = DELTAS.get(block.kind, CALL_DELTA)
            yield {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: step.text}}
        else:
            yield {"type": "content_block_stop", "index": block.index}

    def end(self, end: End) -> Iterator[Event]:
        stopped = end.reason == "stop" and isinstance(end.matched, str)
        delta = {
            "stop_reason": "stop_sequence" if stopped else STOP_REASONS.get(end.reason or "", "end_turn"),
            "stop_sequence": end.matched if stopped else None,
        }
        usage = _usage(end.usage)
        content = [_content(block, empty=self._omits(block)) for block in self._content]
        self._message |= {"content": content, **delta, "usage": usage, **end.extra}
        yield {"type": "message_delta", "delta": delta, "usage": usage, **end.extra}
        yield {"type": "message_stop"}

    def _omits(self, block: Block) -> bool:
        return self._omit_thinking and block.kind == "reasoning"

    def whole(self) -> dict[str, Any]:
        return self._message

    def failed(self, error: dict[str, Any]) -> Event:
        return _error(error, None)


def _content(block: Block, *, empty: bool = False) -> dict[str, Any]:
    """Return a block's content; empty: without its text, for the start of a stream."""
    text = "" if empty else block.text
    if block.kind == "text":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(text)}


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments; {"arguments": text} if they are no JSON object, as when they were cut off."""
    try:
        value = from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return Anthropic's usage, plus the drafted tokens that the target accepted and rejected."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    details = usage.get("completion_tokens_details")
    if details is not None:
        details = {"thinking_tokens": details["reasoning_tokens"], **details}
        del details["reasoning_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.get("completion_tokens") or 0,
        "output_tokens_details": details,
    }


def _error(error: dict[str, Any], status: int | None) -> dict[str, Any]:
    """Return an error in Anthropic's format. error: in OpenAI's; its field and code are kept."""
    kind = ERROR_TYPES.get(status or 0) or ("api_error" if error["type"] == "server_error" else error["type"])
    kind = "overloaded_error" if kind == "service_unavailable_error" else kind
    context = request_middleware.current()
    request_id = None if context is None else context.request_id
    return {"type": "error", "error": error | {"type": kind}, "request_id": request_id}


@dataclass(eq=False)
class MessageErrors:
    """Plain ASGI middleware that gives answers of PATHS Anthropic's format of errors and its `request-id` header."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in PATHS:
            await self.app(scope, receive, send)
            return
        begin: Message = {}

        async def write(message: Message) -> None:
            nonlocal begin
            if message["type"] == "http.response.start":
                if (context := request_middleware.current()) is not None:
                    MutableHeaders(scope=message)["request-id"] = context.request_id
                if message["status"] >= 400:
                    begin = message
                    return
            elif begin:
                data = orjson.dumps(_error(orjson.loads(message["body"])["error"], begin["status"]))
                MutableHeaders(scope=begin)["content-length"] = str(len(data))
                await send(begin)
                message = {**message, "body": data}
            await send(message)

        await self.app(scope, receive, write)
