"""Bodies before parsing: counts, refusals, and that both parsers agree."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pydantic_core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.server.http.errors import ApiError
from outrider.server.http.requests import json_body, yielding_json
from outrider.server.http.requests.json_body import FAST_VALUES, MAX_CONTAINERS, MAX_STRINGS, Meter, decode

INTEGERS = st.lists(st.integers(-5, 2**40), min_size=10, max_size=100)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | INTEGERS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
MANY = FAST_VALUES + 1


def counts(value: Any) -> tuple[int, int]:
    """Containers and strings of a value, including keys."""
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = [*value, *value.values()]
    elif isinstance(value, list):
        inner = value
    found = [counts(one) for one in inner]
    containers = int(isinstance(value, (dict, list))) + sum(one[0] for one in found)
    return containers, int(isinstance(value, str)) + sum(one[1] for one in found)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(VALUES, st.booleans(), st.lists(st.integers(1, 30)))
def test_counts_do_not_depend_on_the_pieces_of_a_body(value: Any, plain: bool, cuts: list[int]) -> None:
    data = json.dumps(value, ensure_ascii=plain).encode("utf-8", "replace")
    meter, at = Meter(10**9), 0
    for length in [*cuts, len(data)]:
        meter.feed(data[at : at + length])
        at += length
    assert (meter.containers, meter.strings) == counts(value)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(VALUES, st.booleans(), st.integers(0, 10**6), st.sampled_from(["", "cut", "drop", "\\", "]", ",", '"']))
def test_both_parsers_agree(value: Any, plain: bool, at: int, change: str) -> None:
    text = json.dumps(value, ensure_ascii=plain)
    if change and text:
        at %= len(text)
        text = text[:at] + {"cut": "", "drop": text[at + 1 :]}.get(change, change + text[at:])
    data = text.encode("utf-8", "replace")

    def read(parse: Any, given: Any) -> str:
        try:
            return repr(parse(given))
        except ValueError:
            return "refused"

    fast = read(lambda given: pydantic_core.from_json(given, allow_inf_nan=False), data)
    assert read(yielding_json.loads, data.decode()) == fast


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b'{"a":[' + b"{}," * MAX_CONTAINERS, "objects and arrays"),
        (b'{"a":[' + b'"",' * MAX_STRINGS, "strings and keys"),
        (b'{"a":[' + b"1," * (MAX_CONTAINERS + MAX_STRINGS + 8), "values"),
    ],
)
def test_too_much_is_refused_before_it_is_parsed(data: bytes, what: str) -> None:
    with pytest.raises(ApiError, match=what) as refused:
        Meter(7).feed(data)
    assert (refused.value.status, refused.value.code) == (400, "body_too_complex")


def test_a_text_counts_once_whatever_its_content() -> None:
    meter = Meter(0)
    meter.feed(json.dumps({"prompt": '{"[,],' * 100_000}).encode())
    assert (meter.containers, meter.strings, meter.commas) == (1, 2, 0)


@pytest.mark.parametrize("values", [0, MANY])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": [1, 2, 3,]}', "not valid JSON"),
        (b'{"a": [' + b"1," * 20 + b"]}", "not valid JSON"),
        (b'{"a": "\\ud800"}', "not valid JSON"),
        (b'{"\\ud800": 1}', "not valid JSON"),
        (b'{"a": "\xff"}', "not valid UTF-8 at byte 7"),
        (b'{"a": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[1]", "an array"),
    ],
)
def test_either_parser_names_the_fault(data: bytes, message: str, values: int) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        decode(data, values)
    assert len(refused.value.message) < 300


def test_parsing_a_large_body_does_not_block_other_threads() -> None:
    data = b'{"a": "' + rb"\u00e9\n" * 1_000_000 + b'", "b": [' + b"12345," * 500_000 + b"1]}"
    ended, longest = threading.Event(), 0.0

    def watch() -> None:
        nonlocal longest
        while not ended.is_set():
            began = time.monotonic()
            time.sleep(0.001)
            longest = max(longest, time.monotonic() - began)

    thread = threading.Thread(target=watch)
    thread.start()
    began = time.monotonic()
    body = decode(data, MANY)
    taken = time.monotonic() - began
    ended.set()
    thread.join()
    assert len(body["a"]) == 2_000_000
    assert len(body["b"]) == 500_001
    assert longest < max(0.25, taken / 2)


def test_a_clients_text_is_shown_shortened() -> None:
    for value in ("x" * 10_000, 10**4000, [1] * 10_000, {"a": "b" * 9999}):
        assert len(json_body.clipped(value)) < 80
    assert json_body.clipped(1.5) == "1.5"
