"""The range of every number in a request: what the worker's tensors hold, and what no product of them overflows.

Checked before any model is made of the body: a value that the scheduler cannot put into a tensor would end it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ApiError
from .json_body import clipped

MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Range:
    """low, high: both allowed. expected: in words, for the error."""

    low: float
    high: float
    expected: str


RANGES = {
    "temperature": Range(0, 100, "a number from 0 to 100"),
    # A probability far below these is none in float32, and nothing would be left to draw from.
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
"""Ranges that no model changes."""


def check(body: dict[str, Any], context_length: int) -> None:
    """Raise ApiError for the first number out of its range. What is no number is left to the check of types."""
    for name, range_ in RANGES.items():
        check_one(name, body.get(name), range_)
    if body.get("top_k") == 0:
        raise out_of_range("top_k", RANGES["top_k"].expected, 0)
    if (fewest := body.get("min_tokens")) is not None:
        longest = context_length - 1
        check_one("min_tokens", fewest, Range(0, longest, f"a number from 0 to {longest}, within the context"))


def check_one(name: str, value: Any, range_: Range) -> None:
    """Raise ApiError for a number out of the range; NaN is out of every one."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not range_.low <= value <= range_.high:
        raise out_of_range(name, range_.expected, value)


def out_of_range(name: str, expected: str, found: object) -> ApiError:
    return ApiError(f"{name!r} takes {expected}, not {clipped(found)}", param=name, code="invalid_value")
