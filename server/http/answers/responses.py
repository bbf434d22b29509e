"""Answers of OpenAI's /v1/responses, and the events of their streams."""

import time
from collections.abc import Iterator
from typing import Any

from ..requests.protocol import ChatRequest
from ..requests.responses import ResponsesRequest
from .blocks import Block, BlockStep
from .translated import End, Event

PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
NAMES = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}


class ResponsesWriter:
    """Writes an answer of /v1/responses. request: as it came. chat: the chat made from it."""

    begins_with_usage = False

    def __init__(self, request: ResponsesRequest, chat: ChatRequest) -> None:
        self._response = _settings(request, chat)
        self._items: list[dict[str, Any]] = []
        self._number = 0

    def begin(self, chat: dict[str, Any]) -> Iterator[Event]:
        self._response |= {"id": f"resp_{chat['id']}", "created_at": chat["created"], "model": chat["model"]}
        yield self._event("response.created", response={**self._response})
        yield self._event("response.in_progress", response={**self._response})

    def step(self, step: BlockStep) -> Iterator[Event]:
        block, name = step.block, f"response.{NAMES[step.block.kind]}"
        where = {"item_id": self._id(block), "output_index": block.index}
        is_call, is_text = block.kind == "call", block.kind == "text"
        if not is_call:
            where["content_index"] = 0
        if step.change == "begin":
            yield self._event("response.output_item.added", output_index=block.index, item=self._item(block))
            if not is_call:
                yield self._event("response.content_part.added", **where, part=_part(block))
        elif step.change == "grow":
            logprobs = {"logprobs": step.logprobs} if is_text else {}
            yield self._event(f"{name}.delta", **where, delta=step.text, **logprobs)
        else:
            item = self._item(block, status="incomplete" if step.cut else "completed")
            self._items.append(item)
            done = {"name": block.name, "arguments": block.text} if is_call else {"text": block.text}
            yield self._event(f"{name}.done", **where, **done, **({"logprobs": block.logprobs} if is_text else {}))
            if not is_call:
                yield self._event("response.content_part.done", **where, part=item["content"][0])
            yield self._event("response.output_item.done", output_index=block.index, item=item)

    def end(self, end: End) -> Iterator[Event]:
        cut = end.reason == "length"
        status = "incomplete" if cut else "completed"
        self._response |= {
            "status": status,
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items,
            "usage": _usage(end.usage),
            **end.extra,
        }
        yield self._event(f"response.{status}", response=self._response)

    def whole(self) -> dict[str, Any]:
        return self._response

    def failed(self, error: dict[str, Any]) -> Event:
        code = "rate_limit_exceeded" if error["type"] == "rate_limit_error" else "server_error"
        failure = {"status": "failed", "output": self._items, "error": {"code": code, "message": error["message"]}}
        return self._event("response.failed", response=self._response | failure)

    def _event(self, kind: str, /, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _id(self, block: Block) -> str:
        return f"{PREFIXES[block.kind]}_{self._response['id'].removeprefix('resp_')}_{block.index}"

    def _item(self, block: Block, status: str = "in_progress") -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id(block), "status": status}
        content = [] if status == "in_progress" else [_part(block)]
        if block.kind == "text":
            return item | {"type": "message", "role": "assistant", "content": content}
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": block.text}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }


def _settings(request: ResponsesRequest, chat: ChatRequest) -> dict[str, Any]:
    """Return the request's own settings, which an answer repeats, and fields that have no value yet."""
    text, choice, reasoning = request.text, request.tool_choice, request.reasoning
    form = None if text is None or text.format is None else text.format.model_dump(by_alias=True)
    return {
        "id": "resp_",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "metadata": request.metadata or {},
        "model": chat.model,
        "output": [],
        "parallel_tool_calls": chat.parallel_tool_calls,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": chat.temperature,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": chat.top_p,
        "truncation": "disabled",
        **request.model_dump(include={"instructions", "max_output_tokens", "user"}),
        **dict.fromkeys(("completed_at", "error", "incomplete_details", "previous_response_id", "usage")),
    }
