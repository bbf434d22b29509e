"""/openapi.json describes the accepted requests, and /docs shows it."""

import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from running import HTTP, Server

import outrider.server
from outrider.server.http.requests.effect import WITHOUT_EFFECT
from outrider.server.http.requests.protocol import CHAT, MEANINGLESS, TEXT, Kind

README = Path(outrider.server.__file__).parent / "README.md"


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    return HTTP.get(f"{server.url}/openapi.json").json()


@pytest.mark.parametrize("kind", [CHAT, TEXT])
def test_every_field_that_is_taken_is_described(document: dict[str, Any], kind: Kind) -> None:
    schema = document["components"]["schemas"][kind.model.__name__]
    assert set(schema["properties"]) == kind.fields | WITHOUT_EFFECT | set(MEANINGLESS)
    assert schema["additionalProperties"] is False


def test_routes_are_documented_in_the_readme(document: dict[str, Any]) -> None:
    table = README.read_text().partition("## Routes")[2].partition("\n\n")[0]
    listed = {path.replace("NAME", "{name}") for path in re.findall(r"`((?:GET|POST) /[^`]*)`", table)}
    described = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert described == listed - {"GET /", "GET /docs", "GET /openapi.json"}, "server/README.md lists the routes"


CHAT_BODY, TEXT_BODY = {"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": "Hi"}


@pytest.mark.parametrize(
    ("body", "is_right"),
    [
        (CHAT_BODY, True),
        (CHAT_BODY | {"n": None}, True),
        ({"messages": []}, False),
        (CHAT_BODY | {"n": 17}, False),
        (CHAT_BODY | {"store": True}, False),
        ({"messages": [{"role": "user", "content": "Hi", "x": 1}]}, False),
        (TEXT_BODY | {"logprobs": 0, "echo": True}, True),
        ({"prompt": ["Hi", "Ho"], "stop_token_ids": [3]}, True),
        (TEXT_BODY | {"logprobs": 21}, False),
        (TEXT_BODY | {"stop": ""}, False),
        (TEXT_BODY | {"model": "another"}, False),
    ],
)
def test_described_requests_are_accepted(
    server: Server, document: dict[str, Any], body: dict[str, Any], is_right: bool
) -> None:
    name, path = ("ChatRequest", "chat/completions") if "messages" in body else ("TextRequest", "completions")
    body = body | {"max_tokens": 1}
    answer = HTTP.post(f"{server.url}/v1/{path}", json=body, timeout=60)
    assert (answer.status_code == 200) is is_right, answer.text
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    assert Draft202012Validator(schema).is_valid(body) is is_right
