"""What a well-formed request may not ask for, checked before it reaches the scheduler. Changes nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.server.http import diffusion
from outrider.server.http.errors import ApiError
from outrider.server.http.protocol import ChatRequest, TextRequest

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 32
BIAS_LIMIT = 100.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the running server can take.

    model: the name it answers to.
    context_length: tokens of prompt and answer together.
    max_body_bytes: of a request's body.
    diffusion: the model fills blocks of tokens, see `diffusion`.
    """

    max_body_bytes: int
    model: str
    vocab_size: int
    context_length: int
    max_choices: int
    has_tool_parser: bool
    diffusion: bool = False


def check(request: ChatRequest | TextRequest, limits: Limits) -> None:
    """Raise ApiError for the first thing that cannot be served."""
    if request.model != limits.model:
        raise ApiError(
            f"model {request.model!r} is not served here; {limits.model!r} is",
            status=404,
            param="model",
            code="model_not_found",
        )
    if limits.diffusion:
        diffusion.check(request)
    if isinstance(request, ChatRequest):
        _check_chat(request, limits)
    else:
        _check_text(request, limits)
    _check_max_tokens(request, limits)
    _check_stop(request)
    level = request.min_tokens_per_second
    if level is not None and not (math.isfinite(level) and level > 0):
        raise _out_of_range("min_tokens_per_second", "a number of tokens per second above 0", level)
    _check_logit_bias(request, limits)
    for token in request.stop_token_ids or []:
        if not 0 <= token < limits.vocab_size:
            raise _out_of_range("stop_token_ids", f"token ids from 0 to {limits.vocab_size - 1}", token)
    if request.stream_options is not None and not request.stream:
        raise ApiError("'stream_options' needs stream=true", param="stream_options", code="invalid_value")
    if request.cache_salt is not None and not isinstance(request.cache_salt, str):
        raise ApiError("'cache_salt' has to be a string", param="cache_salt", code="invalid_type")


def _check_chat(request: ChatRequest, limits: Limits) -> None:
    _check_choices(request.n, 1, limits)
    if request.top_logprobs is not None:
        if not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
            raise _out_of_range("top_logprobs", f"a number from 0 to {MAX_TOP_LOGPROBS}", request.top_logprobs)
        if not request.logprobs:
            raise ApiError("'top_logprobs' needs logprobs=true", param="top_logprobs", code="invalid_value")
    wants_tools = request.tools or any(getattr(message, "tools", None) for message in request.messages)
    if wants_tools and request.tool_choice != "none" and not limits.has_tool_parser:
        raise ApiError(
            "no tool-call parser is known for this model; start the server with --tool-call-parser",
            param="tools",
            code="unsupported_parameter",
        )


def _check_text(request: TextRequest, limits: Limits) -> None:
    prompts = _prompts(request)
    _check_choices(request.n, len(prompts), limits)
    for prompt in prompts:
        if isinstance(prompt, list) and not all(0 <= token < limits.vocab_size for token in prompt):
            raise ApiError(
                f"'prompt' has token ids outside 0 to {limits.vocab_size - 1}", param="prompt", code="invalid_value"
            )
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_TOP_LOGPROBS:
        raise _out_of_range("logprobs", f"a number from 0 to {MAX_TOP_LOGPROBS}", request.logprobs)
    if request.best_of is not None and request.best_of != request.n:
        raise ApiError(
            "this server does not support 'best_of': ask for n and choose",
            param="best_of",
            code="unsupported_parameter",
        )


def _prompts(request: TextRequest) -> list[str] | list[list[int]]:
    prompt = request.prompt
    prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    if not prompts or not all(prompts):
        raise ApiError("'prompt' is empty", param="prompt", code="invalid_value")
    return prompts  # type: ignore[return-value]


def prompt_count(request: ChatRequest | TextRequest) -> int:
    """Of a request that was checked."""
    return len(_prompts(request)) if isinstance(request, TextRequest) else 1


def _check_choices(n: int, prompts: int, limits: Limits) -> None:
    if not 1 <= n <= limits.max_choices:
        raise _out_of_range("n", f"a number from 1 to {limits.max_choices}", n)
    if n * prompts > limits.max_choices:
        raise ApiError(
            f"{prompts} prompts with n={n} make {n * prompts} choices; this server allows {limits.max_choices}",
            param="prompt",
            code="invalid_value",
        )


def _check_max_tokens(request: ChatRequest | TextRequest, limits: Limits) -> None:
    # What does not fit together with the prompt, SGLang finds out: only it has counted the prompt.
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(request, name, None)
        if value == 0 and isinstance(request, TextRequest) and request.echo and not request.stream:
            continue  # nothing but the prompt, for its logprobs
        if value is not None and not 1 <= value < limits.context_length:
            raise _out_of_range(name, f"a number from 1 to {limits.context_length - 1}, within the context", value)


def _check_stop(request: ChatRequest | TextRequest) -> None:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > MAX_STOPS:
        raise ApiError(f"'stop' has {len(stops)} strings; {MAX_STOPS} are allowed", param="stop", code="invalid_value")
    if "" in stops:
        raise ApiError("'stop' has an empty string, which would end every answer", param="stop", code="invalid_value")


def _check_logit_bias(request: ChatRequest | TextRequest, limits: Limits) -> None:
    for token, bias in (request.logit_bias or {}).items():
        if not (token.isascii() and token.isdigit() and int(token) < limits.vocab_size):
            raise _out_of_range("logit_bias", f"keyed by token ids from 0 to {limits.vocab_size - 1}", token)
        if not math.isfinite(bias) or abs(bias) > BIAS_LIMIT:
            raise _out_of_range("logit_bias", f"biases from {-BIAS_LIMIT:g} to {BIAS_LIMIT:g}", bias)


def _out_of_range(name: str, expected: str, found: object) -> ApiError:
    return ApiError(f"{name!r} takes {expected}, not {found!r}", param=name, code="invalid_value")
