"""From the bytes of a request to a validated model, or to an error that says what was wrong."""

from __future__ import annotations

from typing import Any

import pydantic_core
from fastapi import Request
from pydantic import ValidationError

from outrider.server.http.errors import ApiError
from outrider.server.http.protocol import (
    CHAT,
    ChatRequest,
    Kind,
    TextRequest,
    reject_unknown_fields,
    reject_unknown_nested_fields,
)

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
JSON_NAMES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


async def read_body(request: Request, limit: int) -> bytes:
    """The body, read no further than `limit` bytes."""
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


def parse(kind: Kind, data: bytes) -> ChatRequest | TextRequest:
    """Decode and validate; types are strict, since a "5" taken for 5 hides a client's mistake."""
    body = _decode(data)
    reject_unknown_fields(kind, body)
    if kind is CHAT:
        _check_messages(body.get("messages"))
    body = {name: value for name, value in body.items() if value is not None and name in kind.fields}
    try:
        # As JSON once more: strict validation of Python objects would refuse what JSON cannot express.
        parsed = kind.model.model_validate_json(pydantic_core.to_json(body), strict=True)
    except ValidationError as error:
        raise _describe(error, body) from None
    except (AttributeError, TypeError):
        # SGLang's own validators look inside fields before their types are checked.
        raise ApiError("a field has the wrong type") from None
    reject_unknown_nested_fields(parsed, body)
    return parsed


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
