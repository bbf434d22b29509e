"""The one door from the bytes of a request to a checked request, or to an error that says what was wrong.

Every route that takes a body takes it through here, so that none can leave out a check.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, TypeVar

import pydantic_core
from fastapi import Request
from pydantic import TypeAdapter, ValidationError

from outrider.server.http import grammars, validation
from outrider.server.http.errors import ApiError
from outrider.server.http.protocol import (
    CHAT,
    ChatRequest,
    Kind,
    TextRequest,
    given_fields,
    reject_unknown_nested_fields,
    unknown_field,
)
from outrider.server.http.validation import Limits

LEVEL_HEADER = "X-Min-Tokens-Per-Second"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
JSON_NAMES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}

T = TypeVar("T")


async def receive(
    raw: Request,
    kind: Kind,
    limits: Limits,
    entering: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> ChatRequest | TextRequest:
    """A request to OpenAI's routes that SGLang's handlers can answer; raises ApiError for the first thing wrong.

    entering: entered when the body has come whole, around its checks.
    """
    data = await _read(raw, limits.max_body_bytes)
    with entering():
        body = given_fields(kind, _decode(data))
        if kind is CHAT:
            _check_messages(body.get("messages"))
        request = _parse(kind.model.model_validate_json, body)
        reject_unknown_nested_fields(request, body)
        _fill_in(request, raw, limits)
        validation.check(request, limits)
        # Off the event loop: a large grammar must not hold up the streams of others.
        await asyncio.to_thread(grammars.check, request)
    return request


async def receive_as(model: type[T], raw: Request, limits: Limits) -> T:
    """A body with the fields of `model`, a dataclass that checks its own values; raises ApiError like `receive`."""
    body = _decode(await _read(raw, limits.max_body_bytes))
    known = [field.name for field in fields(model)]  # type: ignore[arg-type]
    for name in body:
        if name not in known:
            raise unknown_field(name, name, known)
    return _parse(TypeAdapter(model).validate_json, body)


async def _read(request: Request, limit: int) -> bytes:
    """The body, read no further than `limit` bytes; raises ClientDisconnect where it does not come whole."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(
            f"the content type is {content_type or 'missing'}; send 'Content-Type: application/json'",
            status=415,
            code="unsupported_media_type",
        )
    too_large = ApiError(f"the body is larger than {limit} bytes", status=413, code="request_too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    chunks = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def _decode(data: bytes) -> dict[str, Any]:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not valid UTF-8 at byte {error.start}", code="invalid_json") from None
    try:
        body = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(f"the body is {_json_name(body)}; it has to be an object", code="invalid_json")
    return body


def _parse(validate: Callable[..., T], body: dict[str, Any]) -> T:
    """The body as a model; types are strict, since a "5" taken for 5 hides a client's mistake."""
    try:
        # As JSON once more: strict validation of Python objects would refuse what JSON cannot express.
        return validate(pydantic_core.to_json(body), strict=True)
    except ValidationError as error:
        raise _describe(error, body) from None
    except (AttributeError, TypeError):
        # SGLang's own validators look inside fields before their types are checked.
        raise ApiError("a field has the wrong type") from None


def _fill_in(request: ChatRequest | TextRequest, raw: Request, limits: Limits) -> None:
    """Set what the body left to others: the model to the one there is, the service level to the header's.

    The header is for clients and proxies that cannot change the body; the body wins.
    """
    if "model" not in request.model_fields_set:
        request.model = limits.model
    level = raw.headers.get(LEVEL_HEADER)
    if level is None or request.min_tokens_per_second is not None:
        return
    try:
        request.min_tokens_per_second = float(level)
    except ValueError:
        raise ApiError(f"header {LEVEL_HEADER} takes tokens per second, not {level!r}", code="invalid_value") from None


def _check_messages(messages: Any) -> None:
    """The rules whose violations pydantic would report for each member of a union."""
    if messages is None:
        raise ApiError("'messages' is required", param="messages", code="missing_required_parameter")
    if not isinstance(messages, list):
        raise ApiError(f"'messages' is {_json_name(messages)}; it has to be an array", param="messages")
    if not messages:
        raise ApiError("'messages' is empty; send at least one message", param="messages", code="empty_array")
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if not isinstance(message, dict):
            raise ApiError(f"{path!r} is {_json_name(message)}; it has to be an object", param=path)
        role = message.get("role")
        if role not in ROLES:
            raise ApiError(f"'{path}.role' is one of {', '.join(ROLES)}, not {role!r}", param=f"{path}.role")
        _check_content(message, path)


def _check_content(message: dict[str, Any], path: str) -> None:
    content = message.get("content")
    if content is None:
        if message["role"] == "assistant" and message.get("tool_calls"):
            return
        raise ApiError(f"'{path}.content' is required", param=f"{path}.content", code="missing_required_parameter")
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        raise ApiError(
            f"'{path}.content' is {_json_name(content)}; it has to be a string or an array of text parts",
            param=f"{path}.content",
        )
    for index, part in enumerate(content):
        part_type = part.get("type") if isinstance(part, dict) else None
        if part_type != "text":
            shown = repr(part_type) if part_type else _json_name(part)
            raise ApiError(
                f"'{path}.content[{index}]' is {shown}; this server takes text only, and fetches nothing",
                param=f"{path}.content[{index}]",
                code="unsupported_content",
            )


def _describe(error: ValidationError, body: dict[str, Any]) -> ApiError:
    """One line for the most specific of the errors, without the names of unions' members."""
    details = max(error.errors(), key=lambda item: len(_path(item["loc"], body)))
    path = _path(details["loc"], body)
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or None
    if details["type"] == "missing":
        missing = f"{param}.{details['loc'][-1]}" if param else str(details["loc"][-1])
        return ApiError(f"{missing!r} is required", param=missing, code="missing_required_parameter")
    message = details["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if details["type"] == "value_error":
        return ApiError(message, param=param, code="invalid_value")
    found = _json_name(details["input"])
    return ApiError(f"{param!r}: {message}, not {found}", param=param, code="invalid_type")


def _path(location: tuple[int | str, ...], body: Any) -> list[int | str]:
    """The parts of a pydantic location that lead somewhere in the JSON; the others name types."""
    path: list[int | str] = []
    for part in location:
        if isinstance(body, dict) and part in body:  # noqa: SIM114
            body = body[part]
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        else:
            continue
        path.append(part)
    return path


def _json_name(value: Any) -> str:
    if isinstance(value, str):
        return repr(value) if len(value) < 40 else "a string"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return str(value)
    return JSON_NAMES.get(type(value), "something else")
