"""The fields by which a router connects two servers."""

from typing import Any

import pytest
from sglang.srt.disaggregation import utils

from outrider.server.http.errors import ApiError
from outrider.server.http.requests import transfer
from outrider.server.http.requests.protocol import ChatRequest, TextRequest

FIELDS = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 2**63 - 1}


def test_they_are_taken_from_the_body() -> None:
    body = {"model": "m", "prompt": "x", **FIELDS}
    assert transfer.take(body, "decode") == ({"model": "m", "prompt": "x"}, FIELDS)
    assert transfer.take(body, "") == (body, {})  # refused later by name


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("missing", FIELDS)
def test_a_request_without_a_router_names_the_router(role: str, missing: str) -> None:
    body = {name: value for name, value in FIELDS.items() if name != missing}
    with pytest.raises(ApiError, match=f"the {role} server of two; send requests to the router") as refused:
        transfer.take(body, role)
    assert (refused.value.status, refused.value.param) == (400, missing)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bootstrap_host": ""},
        {"bootstrap_host": "x" * 254},
        {"bootstrap_host": ["10.0.0.1"]},
        {"bootstrap_host": utils.FAKE_BOOTSTRAP_HOST},
        {"bootstrap_port": 65536},
        {"bootstrap_port": "8998"},
        {"bootstrap_port": True},
        {"bootstrap_room": 0},
        {"bootstrap_room": 2**63},
        {"bootstrap_room": [1, 2]},
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        transfer.take(FIELDS | wrong, "decode")
    assert (refused.value.param, refused.value.code) == (next(iter(wrong)), "invalid_value")


def test_options_that_two_servers_cannot_serve_together() -> None:
    messages = [{"role": "user", "content": "x"}]
    transfer.check(ChatRequest(model="m", messages=messages, logprobs=True))
    transfer.check(TextRequest(model="m", prompt="x", logprobs=1))
    transfer.check(TextRequest(model="m", prompt="x", echo=True))
    with pytest.raises(ApiError, match="send the request n times"):
        transfer.check(ChatRequest(model="m", messages=messages, n=2))
    with pytest.raises(ApiError, match="the prompt's logprobs stay on the prefill server"):
        transfer.check(TextRequest(model="m", prompt="x", echo=True, logprobs=1))
