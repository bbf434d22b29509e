"""Bodies before parsing: counts and refusals."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.server.http.errors import ApiError
from outrider.server.http.requests import json_body
from outrider.server.http.requests.json_body import MAX_CONTAINERS, MAX_STRINGS, Meter, decode

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


def counts(value: Any) -> tuple[int, int]:
    """Containers and strings of a value, including keys."""
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = [*value, *value.values()]
    elif isinstance(value, list):
        inner = value
    each = [counts(part) for part in inner]
    containers = int(isinstance(value, (dict, list))) + sum(part[0] for part in each)
    return containers, int(isinstance(value, str)) + sum(part[1] for part in each)


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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "not valid JSON"),
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
def test_an_error_names_the_fault(data: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        decode(data)
    assert len(refused.value.message) < 300


def test_a_clients_text_is_shown_shortened() -> None:
    for value in ("x" * 10_000, 10**4000, [1] * 10_000, {"a": "b" * 9999}):
        assert len(json_body.clipped(value)) < 80
    assert json_body.clipped(1.5) == "1.5"
