"""What a request may not ask of a block-diffusion model, and why: its tokens are not drawn from left to right."""

from __future__ import annotations

from ..errors import ApiError
from .protocol import ChatRequest, TextRequest

UNORDERED = "a block-diffusion model draws tokens before those on their left are known"
LOGPROBS = "the tokens of a block-diffusion model have no probability given those before them"
PARSED = "an answer in its form cannot be enforced: " + UNORDERED
NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "frequency_penalty": ((0,), UNORDERED),
    "presence_penalty": ((0,), UNORDERED),
    "repetition_penalty": ((1,), UNORDERED),
    "min_tokens": ((0,), UNORDERED),
    "logit_bias": (({},), "block diffusion applies no bias to its distributions"),
    "regex": ((), PARSED),
    "ebnf": ((), PARSED),
    "json_schema": ((), PARSED),
    "logprobs": ((False,), LOGPROBS),
    "tools": (([],), PARSED),
}
"""Fields, the values of theirs that ask for nothing, and why others cannot be served."""


def check(request: ChatRequest | TextRequest) -> None:
    """Raise ApiError for the first field that block diffusion cannot serve."""
    for name, (neutral, reason) in NEUTRAL.items():
        value = getattr(request, name, None)
        if value is not None and value not in neutral:
            raise _refusal(name, reason)
    if request.response_format is not None and request.response_format.type != "text":
        raise _refusal("response_format", PARSED)
    if any(getattr(message, "tools", None) for message in getattr(request, "messages", ())):
        raise _refusal("tools", PARSED)
    if request.speculation is not None and request.speculation.trace:
        raise _refusal("speculation.trace", "no token has a drafter")


def _refusal(name: str, reason: str) -> ApiError:
    return ApiError(f"this model does not support {name!r}: {reason}", param=name, code="unsupported_parameter")
