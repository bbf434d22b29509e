"""Turn a body's bytes into a checked request. Raises ApiError for the first mistake.

Every route with a body reads it here, so that no route can skip a check.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, TypeVar

from fastapi import Request
from pydantic import TypeAdapter

from .. import offload
from ..errors import ApiError
from ..keys import admission
from ..keys.key_file import Key
from . import bounds, grammars, transfer, validation
from .dialect import Dialect, Translated
from .effect import with_effect
from .json_body import MAX_CONTAINERS, SMALL_BYTES, Meter, clipped, decode
from .parsing import parse
from .protocol import ChatRequest, Kind, TextRequest, given_fields, reject_unknown_nested_fields
from .validation import Limits

LEVEL_HEADER, LEVEL = "X-Min-Tokens-Per-Second", "min_tokens_per_second"
LEARN_HEADER = "X-Outrider-Learn"

T = TypeVar("T")


async def receive(
    raw: Request,
    form: Kind | Dialect,
    limits: Limits,
    entering: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> ChatRequest | TextRequest:
    """Return a request that SGLang's handlers can answer. Raises ApiError for the first mistake.

    entering: context around the checks, entered when the body is complete.
    """
    numbers_allowed = limits.max_choices * limits.context_length if form.ids else 0
    data = await _read(raw, limits.max_body_bytes, MAX_CONTAINERS + numbers_allowed)
    level, learn = raw.headers.get(LEVEL_HEADER), _may_learn(raw.headers.get(LEARN_HEADER), limits)
    with entering():
        if len(data) <= SMALL_BYTES:
            request = _checked(data, form, limits, level, learn)
        else:
            request = await offload.run(len(data), _checked, data, form, limits, level, learn)
    _set_apart(request, limits)
    return request


def _may_learn(header: str | None, limits: Limits) -> bool:
    """Return True if the server learns, and header and key allow it. Raises ApiError for a wrong header."""
    if header is not None and header.lower() not in ("on", "off"):
        raise ApiError(f"header {LEARN_HEADER} is on or off, not {clipped(header)}", code="invalid_value")
    key = _key()
    return limits.learns and (header or "on").lower() == "on" and (key is None or key.learn)


def _key() -> Key | None:
    """Return the key of the current request; None if none is needed."""
    current = admission.current()
    return current.key_usage.key if current is not None and current.key_usage is not None else None


def _set_apart(request: ChatRequest | TextRequest, limits: Limits) -> None:
    """Set whose texts lookup searches, and the drafter of the request's key or adapter, where they are kept apart.
    Requests with different drafters share no cached prefixes."""
    key = _key()
    if limits.looks_across:
        request._corpus = "" if key is None else key.digest.hex()
    if limits.drafter_of is not None:
        request._own = drafter = limits.drafter_of(key, request.model)
        request.extra_key = ":".join((drafter.secret, drafter.learner, drafter.learned))


async def receive_as(model: type[T], raw: Request, limits: Limits) -> T:
    """Parse a body to `model`, a dataclass that checks its own values. Raises ApiError like `receive`."""
    data = await _read(raw, min(limits.max_body_bytes, SMALL_BYTES), 0)
    known = [field.name for field in fields(model)]  # type: ignore[arg-type]
    return parse(TypeAdapter(model).validate_json, given_fields(decode(data), known, {}, {}))


def _checked(
    data: bytes, form: Kind | Dialect, limits: Limits, level: str | None, learn: bool
) -> ChatRequest | TextRequest:
    """Parse and check the bytes of a body. level: header with the service level. learn: see `_may_learn`."""
    whole = with_effect(decode(data))
    translated = form.translate(form.given_fields(whole)) if isinstance(form, Dialect) else Translated(form, whole)
    try:
        request = _checked_body(translated.body, translated.kind, limits, level)
    except ApiError as error:
        if isinstance(form, Dialect):
            error.message, error.param = form.renamed(error.message, error.param, translated.places)
        raise
    request._original = translated.original
    request._body_bytes = len(data)
    request._stored = whole.get("store") is not False
    request._learn = learn and request._stored and not (limits.images and limits.images.within(request))
    return request


def _checked_body(whole: dict[str, Any], kind: Kind, limits: Limits, level: str | None) -> ChatRequest | TextRequest:
    whole, routed = transfer.take(whole, limits.role if kind.is_answered else "")
    body = given_fields(whole, kind.fields, kind.unsupported, kind.meaningless)
    prompt = _check_amounts(body, kind, limits)
    bounds.check_numbers(body, bounds.ranges_of(kind.model, limits.context_length, limits.max_choices))
    validate: Callable[..., ChatRequest | TextRequest] = kind.model.model_validate_json
    request = parse(validate, body)
    reject_unknown_nested_fields(request, body)
    if isinstance(request, TextRequest):
        request.prompt = prompt
    _fill_in(request, level, limits)
    validation.check(request, limits)
    grammars.check(request)
    if routed:
        transfer.check(request)
        for name, value in routed.items():
            setattr(request, name, value)
    return request


def _check_amounts(body: dict[str, Any], kind: Kind, limits: Limits) -> Any:
    """Refuse too large bodies, and return the checked prompt of a completion. The body gets a short prompt instead, so
    that pydantic does not check a million token ids."""
    prompt = None
    if kind.model is ChatRequest:
        bounds.check_messages(body.get("messages"), limits.images if kind.is_answered else None)
        texts, param = [list(bounds.texts_of(body["messages"]))], "messages"
    else:
        prompt, body["prompt"] = body.get("prompt"), "-"
        prompts = bounds.check_prompt(prompt, limits.vocab_size, limits.max_choices, limits.context_length)
        texts, param = [[text] for text in prompts if isinstance(text, str)], "prompt"
    bounds.check_sizes(body, limits.vocab_size)
    if limits.prompt_length is not None:
        for text in texts:
            limits.prompt_length.check(text, param)
    return prompt


async def _read(request: Request, limit: int, numbers_allowed: int) -> bytes:
    """Read the body, at most `limit` bytes, and refuse too many values unless it is small.

    Raises ClientDisconnect if it ends early.
    """
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
    meter = Meter(numbers_allowed)
    chunks = []
    size = measured = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large
        chunks.append(chunk)
        if size > SMALL_BYTES:
            for waiting in chunks[measured:]:
                meter.feed(waiting)
            measured = len(chunks)
    return b"".join(chunks)


def _fill_in(request: ChatRequest | TextRequest, level: str | None, limits: Limits) -> None:
    """Set missing fields: the model to the served one, the service level to the header's. Bound the answer to the
    context; `metering` bounds it to the rest after the prompt.

    The header is for clients and proxies that cannot change the body; the body wins.
    """
    if "model" not in request.model_fields_set:
        request.model = limits.model
    for name in ("max_tokens", "max_completion_tokens"):
        if (longest := getattr(request, name, None)) is not None:
            setattr(request, name, min(longest, limits.context_length - 1))
    if isinstance(request, ChatRequest) and request.continue_final_message:
        last = request.messages[-1]
        if isinstance(last.content, list):  # SGLang continues one text
            last.content = " ".join(getattr(part, "text", "") for part in last.content)
    if level is None or request.min_tokens_per_second is not None:
        return
    try:
        request.min_tokens_per_second = float(level)
    except ValueError:
        shown = clipped(level)
        raise ApiError(f"header {LEVEL_HEADER} takes tokens per second, not {shown}", code="invalid_value") from None
    bounds.check_number(LEVEL, request.min_tokens_per_second, bounds.RANGES[LEVEL])
