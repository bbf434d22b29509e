"""Parse a decoded body to a model, or raise an error of one line that names the field."""

from collections.abc import Callable
from typing import Any, TypeVar

import pydantic_core
from pydantic import ValidationError

from ..errors import ApiError, invalid_value
from .json_body import clipped, name_of

T = TypeVar("T")


def parse(validate: Callable[..., T], body: dict[str, Any]) -> T:
    """Parse the body with strict types: accepting "5" for 5 would hide a client's mistake."""
    try:
        # From JSON again: strict validation of Python objects refuses types that JSON cannot express.
        return validate(pydantic_core.to_json(body), strict=True)
    except ValidationError as error:
        raise _describe(error, body) from None
    except (AttributeError, TypeError):
        # SGLang's own validators look inside fields before their types are checked.
        raise ApiError("a field has the wrong type") from None


def _describe(error: ValidationError, body: dict[str, Any]) -> ApiError:
    """Return one line for the most specific of the errors, without the names of unions' members."""

    def specific(item: Any) -> tuple[int, bool]:
        return len(_path(item["loc"], body)), not item["type"].endswith("_type")

    details = max(error.errors(include_url=False), key=specific)
    path = _path(details["loc"], body)
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or None
    if details["type"] == "missing":
        missing = f"{param}.{details['loc'][-1]}" if param else str(details["loc"][-1])
        return ApiError(f"{missing!r} is required", param=missing, code="missing_required_parameter")
    if details["type"].startswith("union_tag"):
        tag = details["ctx"].get("tag", "of no type") if "ctx" in details else "of no type"
        expected = (details.get("ctx") or {}).get("expected_tags", "objects with a known 'type'")
        message = f"{param!r} is {clipped(tag)}; this server takes {expected}"
        return ApiError(message, param=param, code="unsupported_content")
    message = details["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if details["type"] == "value_error":
        return invalid_value(param, message)
    if details["type"].startswith("too_"):
        return invalid_value(param, f"{param!r}: {message}")
    tag = name_of(details["input"])
    return ApiError(f"{param!r}: {message}, not {tag}", param=param, code="invalid_type")


def _path(location: tuple[int | str, ...], body: Any) -> list[int | str]:
    """Return the parts of a pydantic location that exist in the JSON; the remaining parts name types."""
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
