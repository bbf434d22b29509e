"""Checks of requests: accepted requests can be answered, and no check is skipped."""

import asyncio
import json

import pytest
import receiving
from receiving import raw_request

from outrider.server.http.errors import ApiError
from outrider.server.http.requests import receive
from outrider.server.http.requests.protocol import CHAT, TEXT, ChatRequest, Kind, TextRequest
from outrider.server.http.requests.receive import LEVEL_HEADER
from outrider.server.http.requests.validation import Limits
from outrider.server.tune.request import TuneRequest

LIMITS = Limits(
    max_body_bytes=1000, model="small", vocab_size=100, context_length=64, max_choices=4, has_tool_parser=False
)
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


def received(kind: Kind, body: object, **headers: str) -> ChatRequest | TextRequest:
    return receiving.received(kind, body, LIMITS, **headers)


def refusal(kind: Kind, body: object, **headers: str) -> ApiError:
    with pytest.raises(ApiError) as refused:
        received(kind, body, **headers)
    return refused.value


def test_a_content_type_is_required() -> None:
    assert refusal(CHAT, HELLO, content_type="text/plain").status == 415
    received(CHAT, HELLO, content_type="application/json; charset=utf-8")


def test_level_of_the_header_goes_in_and_the_body_wins() -> None:
    name = LEVEL_HEADER.lower()
    assert received(CHAT, HELLO).min_tokens_per_second is None
    assert received(CHAT, HELLO, **{name: "12.5"}).min_tokens_per_second == 12.5
    assert received(CHAT, HELLO | {"min_tokens_per_second": 3}, **{name: "12.5"}).min_tokens_per_second == 3
    assert LEVEL_HEADER in refusal(CHAT, HELLO, **{name: "fast"}).message
    for impossible in ("nan", "0", "-1"):
        assert refusal(CHAT, HELLO, **{name: impossible}).param == "min_tokens_per_second"


def tune_request(body: object) -> TuneRequest:
    return asyncio.run(receive.receive_as(TuneRequest, raw_request(json.dumps(body).encode()), LIMITS))


def test_request_for_a_measurement() -> None:
    body = {"quick": True, "max_requests": 2, "rounds": None, "name": "mine"}
    assert tune_request(body) == TuneRequest(quick=True, max_requests=2, name="mine")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"quik": True}, "unknown field 'quik'; did you mean 'quick'?"),
        ({"rounds": "3"}, "'rounds': input should be a valid integer, not '3'"),
        ({"rounds": 0}, "'rounds' is at least 1, not 0"),
        ({"name": "../up"}, "'name' is made of letters"),
        ([], "the body is an array; it has to be an object"),
    ],
)
def test_measurement_that_cannot_be(body: object, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        tune_request(body)
    assert message in refused.value.message


OTHERS = "routed_dp_rank data_parallel_rank disagg_prefill_dp_rank priority routing_key rid session_id extra_key "
OTHERS += "bootstrap_host bootstrap_port bootstrap_room conversation_id return_hidden_states"


@pytest.mark.parametrize("kind", [CHAT, TEXT])
@pytest.mark.parametrize("field", OTHERS.split())
def test_no_field_chooses_engine_priority_or_name(kind: Kind, field: str) -> None:
    prompt = HELLO if kind is CHAT else {"prompt": "Hello"}
    assert refusal(kind, prompt | {field: 1}).param == field
