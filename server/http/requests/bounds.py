"""Limit the size of every part of a request, in plain code on the decoded body.

The time of all later stages grows with it: pydantic's models, the chat template, the tokenizer, the scheduler. The
first violation is the error; pydantic would collect one for each of a million parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pydantic_core

from ..errors import ApiError, invalid_value
from .json_body import Meter, clipped, name_of
from .protocol import TextRequest

if TYPE_CHECKING:
    from .images import Images

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAY_BE_EMPTY = ("assistant", "tool", "function")
"""Roles with optional content: a turn may consist of calls alone, and a tool may return an empty result."""

MAX_MESSAGES = 2048
MAX_TOOLS = 128
MAX_STOPS = 32
MAX_STOP_CHARACTERS = 1024
"""Characters of all stop strings together."""
MAX_STOP_TOKENS = 64
MAX_BIASES = 1024
BIAS_LIMIT = 100.0
MAX_TEXT = 4096
"""Characters of each field in SHORT_TEXTS."""
MAX_OPTION_CHARACTERS = 512 * 1024
"""Characters of all parts other than the prompt together: tools, schemas, grammars."""
MAX_DEPTH = 64
SHORT_TEXTS = ("model", "user", "cache_salt")
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Range:
    """low, high: both included. expected: the range in words, for errors."""

    low: float
    high: float
    expected: str


RANGES = {
    "temperature": Range(0, 100, "a number from 0 to 100"),
    # A probability far below these is 0 in float32: no token could be drawn.
    "top_p": Range(1e-6, 1, "a number from 0.000001 to 1"),
    "min_p": Range(0, 1, "a number from 0 to 1"),
    "top_k": Range(-1, 2**31 - 1, f"-1, or a number from 1 to {2**31 - 1}"),
    "frequency_penalty": Range(-2, 2, "a number from -2 to 2"),
    "presence_penalty": Range(-2, 2, "a number from -2 to 2"),
    # Logits are divided by it, and by the temperature.
    "repetition_penalty": Range(0.01, 2, "a number from 0.01 to 2"),
    "seed": Range(-(2**63), 2**63 - 1, "an integer of 64 bits"),
    "min_tokens_per_second": Range(1e-3, 1e6, "a number of tokens per second from 0.001 to 1000000"),
}
"""Ranges that hold for every model."""


def check_sizes(body: dict[str, Any], vocab_size: int) -> None:
    """Raise ApiError for the first field of either kind of request that is too large."""
    for name in SHORT_TEXTS:
        if isinstance(text := body.get(name), str) and len(text) > MAX_TEXT:
            raise _too_many(name, len(text), "characters", MAX_TEXT)
    _check_stop(body.get("stop"))
    _check_stop_tokens(body.get("stop_token_ids"), vocab_size)
    _check_biases(body.get("logit_bias"), vocab_size)
    _check_options(body)


def check_messages(messages: Any, images: Images | None = None) -> None:
    """Check number and form; pydantic would report an error for each member of the union of messages.

    images: checks the images for a model that reads them.
    """
    if messages is None:
        raise ApiError("'messages' is required", param="messages", code="missing_required_parameter")
    if not isinstance(messages, list):
        raise ApiError(f"'messages' is {name_of(messages)}; it has to be an array", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise _too_many("messages", len(messages), "messages", MAX_MESSAGES)
    patches = 0
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if not isinstance(message, dict):
            raise ApiError(f"{path!r} is {name_of(message)}; it has to be an object", param=path)
        role = message.get("role")
        if role not in ROLES:
            raise ApiError(f"'{path}.role' is one of {', '.join(ROLES)}, not {clipped(role)}", param=f"{path}.role")
        patches += _check_content(message, path, images)
    if images is not None and images.tokens_of(patches) >= images.context_length:
        raise too_long("messages", images.context_length)


def texts_of(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the texts of checked messages."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            for part in content:
                if isinstance(text := part.get("text"), str):
                    yield text


def _check_content(message: dict[str, Any], path: str, images: Images | None) -> int:
    """Return the number of image patches in a message. Raises ApiError for unsupported content."""
    content, patches = message.get("content"), 0
    if content is None:
        if message["role"] in MAY_BE_EMPTY:
            return 0
        raise ApiError(f"'content' of {path!r} is required", param=f"{path}.content", code="missing_required_parameter")
    if isinstance(content, str):
        return 0
    if not isinstance(content, list):
        raise ApiError(
            f"'{path}.content' is {name_of(content)}; it has to be a string or an array of text parts",
            param=f"{path}.content",
        )
    for index, part in enumerate(content):
        part_type = part.get("type") if isinstance(part, dict) else None
        place = f"{path}.content[{index}]"
        if part_type == "image_url" and images is not None and message["role"] == "user":
            patches += images.check(part, place)
            continue
        if part_type != "text":
            shown = clipped(part_type) if part_type else name_of(part)
            taken = "text only" if images is None else "text, and images of users"
            raise ApiError(
                f"'{place}' is {shown}; this server takes {taken}, and fetches nothing",
                param=place,
                code="unsupported_content",
            )
        if not isinstance(part.get("text"), str):
            raise ApiError(f"'{place}.text' has to be a string", param=f"{place}.text", code="invalid_type")
    return patches


def check_prompt(prompt: Any, vocab_size: int, max_choices: int, context_length: int) -> list[str] | list[list[int]]:
    """Return the prompts of a completion, in a list. Raises ApiError for a malformed prompt, or too many token ids."""
    if prompt is None:
        raise ApiError("'prompt' is required", param="prompt", code="missing_required_parameter")
    prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else [prompt]
    if len(prompts) > max_choices:
        raise _too_many("prompt", len(prompts), "prompts", max_choices)
    for item in prompts:
        if isinstance(item, (str, list)) and not item:
            raise invalid_value("prompt", "'prompt' is empty")
        if isinstance(item, list) and len(item) > context_length:
            raise too_long("prompt", context_length)
        is_ids = isinstance(item, list) and set(map(type, item)) == {int}
        if type(item) is not type(prompts[0]) or not (is_ids or isinstance(item, str)):
            raise ApiError(
                "'prompt' is a string, an array of token ids, or an array of such", param="prompt", code="invalid_type"
            )
        if is_ids and not 0 <= min(item) <= max(item) < vocab_size:
            raise invalid_value("prompt", f"'prompt' has token ids outside 0 to {vocab_size - 1}")
    return prompts


def _check_stop(stop: Any) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list):
        return
    if len(stops) > MAX_STOPS:
        raise invalid_value("stop", f"'stop' has {len(stops)} strings; {MAX_STOPS} are allowed")
    texts = [text for text in stops if isinstance(text, str)]
    if "" in texts:
        raise invalid_value("stop", "'stop' has an empty string, which would end every answer")
    if (characters := sum(map(len, texts))) > MAX_STOP_CHARACTERS:
        raise _too_many("stop", characters, "characters", MAX_STOP_CHARACTERS)


def _check_stop_tokens(tokens: Any, vocab_size: int) -> None:
    if not isinstance(tokens, list):
        return
    if len(tokens) > MAX_STOP_TOKENS:
        raise _too_many("stop_token_ids", len(tokens), "token ids", MAX_STOP_TOKENS)
    for token in tokens:
        if type(token) is int and not 0 <= token < vocab_size:
            raise out_of_range("stop_token_ids", f"token ids from 0 to {vocab_size - 1}", token)


def _check_biases(biases: Any, vocab_size: int) -> None:
    if not isinstance(biases, dict):
        return
    if len(biases) > MAX_BIASES:
        raise _too_many("logit_bias", len(biases), "tokens", MAX_BIASES)
    for token, bias in biases.items():
        is_number = token.isascii() and token.isdigit() and len(token) <= len(str(vocab_size))
        if not (is_number and int(token) < vocab_size):
            raise out_of_range("logit_bias", f"keyed by token ids from 0 to {vocab_size - 1}", token)
        if type(bias) in (int, float) and not -BIAS_LIMIT <= bias <= BIAS_LIMIT:
            raise out_of_range("logit_bias", f"biases from {-BIAS_LIMIT:g} to {BIAS_LIMIT:g}", bias)


def _check_options(body: dict[str, Any]) -> None:
    """Check the number of tools, and characters and depth of all parts other than the prompt."""
    messages = body.get("messages") or []
    tools = [body.get("tools"), *(message.get("tools") for message in messages)]
    if (count := sum(len(some) for some in tools if isinstance(some, list))) > MAX_TOOLS:
        raise _too_many("tools", count, "tools", MAX_TOOLS)
    for name, value in body.items():
        if name not in ("messages", "prompt") and _characters(value, name) > MAX_OPTION_CHARACTERS:
            raise invalid_value(name, f"{name!r} has more than {MAX_OPTION_CHARACTERS} characters")
    for index, message in enumerate(messages):
        rest = {key: value for key, value in message.items() if key != "content"}
        _check_beside_content(rest, f"messages[{index}]")


def _check_beside_content(rest: dict[str, Any], path: str) -> None:
    """Check a message without its content, `rest`."""
    if _characters(rest, path) > MAX_OPTION_CHARACTERS:
        raise invalid_value(path, f"{path!r} has more than {MAX_OPTION_CHARACTERS} characters beside its content")
    calls = rest.get("tool_calls")
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str):
            _check_arguments(arguments, f"{path}.tool_calls[{index}].function.arguments")


def _check_arguments(arguments: str, path: str) -> None:
    """Check JSON within a string, which SGLang decodes for the chat template."""
    try:
        meter = Meter(0)
        meter.feed(arguments.encode())
        _characters(pydantic_core.from_json(arguments), path)
    except ApiError as error:
        raise ApiError(error.message.replace("the body", repr(path)), param=path, code=error.code) from None
    except ValueError as error:
        raise invalid_value(path, f"{path!r} is not valid JSON: {error}") from None


def _characters(value: Any, name: str, depth: int = 0) -> int:
    """Count the characters of all texts and keys in a value; raises ApiError for one nested too deeply."""
    if isinstance(value, str):
        return len(value)
    if depth > MAX_DEPTH:
        raise invalid_value(name, f"{name!r} is nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        return sum(len(key) + _characters(inner, name, depth + 1) for key, inner in value.items())
    if isinstance(value, list):
        return sum(_characters(inner, name, depth + 1) for inner in value)
    return 0


def too_long(param: str, context_length: int) -> ApiError:
    """Return the error for a prompt that cannot fit."""
    return ApiError(
        f"the prompt is longer than the model's context length ({context_length} tokens)",
        param=param,
        code="context_length_exceeded",
    )


def _too_many(name: str, count: int, what: str, most: int) -> ApiError:
    return invalid_value(name, f"{name!r} has {count} {what}; {most} are allowed")


@cache
def ranges_of(model: type, context_length: int, max_choices: int) -> Mapping[str, Range]:
    """Return the ranges of all numbers in a request of this model."""
    longest = context_length - 1
    # With `echo`, a completion may be its prompt alone, see `validation`. `receive` bounds it to the context.
    answer = Range(0 if model is TextRequest else 1, math.inf, "a number from 1 on")
    logprobs = Range(0, MAX_TOP_LOGPROBS, f"a number from 0 to {MAX_TOP_LOGPROBS}")
    return RANGES | {
        "n": Range(1, max_choices, f"a number from 1 to {max_choices}"),
        "max_tokens": answer,
        "max_completion_tokens": answer,
        "min_tokens": Range(0, longest, f"a number from 0 to {longest}, within the context"),
        "top_logprobs": logprobs,
        "logprobs": logprobs,
    }


def check_numbers(body: dict[str, Any], ranges: Mapping[str, Range]) -> None:
    """Raise ApiError for the first number out of its range; `parse` refuses other types."""
    for name, range_ in ranges.items():
        check_number(name, body.get(name), range_)
    if body.get("top_k") == 0:
        raise out_of_range("top_k", RANGES["top_k"].expected, 0)


def check_number(name: str, value: Any, range_: Range) -> None:
    """Raise ApiError for a number out of the range; NaN is out of every range."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not range_.low <= value <= range_.high:
        raise out_of_range(name, range_.expected, value)


def out_of_range(name: str, expected: str, value: object) -> ApiError:
    return invalid_value(name, f"{name!r} takes {expected}, not {clipped(value)}")
