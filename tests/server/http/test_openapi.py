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


def validator(document: dict[str, Any], name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": document["components"]})


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


@pytest.mark.parametrize(
    ("name", "path", "body", "is_right"),
    [
        ("ChatRequest", "chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, True),
        ("ChatRequest", "chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "n": None}, True),
        ("ChatRequest", "chat/completions", {"messages": []}, False),
        ("ChatRequest", "chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "n": 17}, False),
        ("ChatRequest", "chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "store": True}, False),
        ("ChatRequest", "chat/completions", {"messages": [{"role": "user", "content": "Hi", "x": 1}]}, False),
        ("TextRequest", "completions", {"prompt": "Hi", "logprobs": 0, "echo": True}, True),
        ("TextRequest", "completions", {"prompt": ["Hi", "Ho"], "stop_token_ids": [3]}, True),
        ("TextRequest", "completions", {"prompt": "Hi", "logprobs": 21}, False),
        ("TextRequest", "completions", {"prompt": "Hi", "stop": ""}, False),
        ("TextRequest", "completions", {"prompt": "Hi", "model": "another"}, False),
    ],
)
def test_described_requests_are_accepted(
    server: Server, document: dict[str, Any], name: str, path: str, body: dict[str, Any], is_right: bool
) -> None:
    body = body | {"max_tokens": 1}
    answer = HTTP.post(f"{server.url}/v1/{path}", json=body, timeout=60)
    assert (answer.status_code == 200) is is_right, answer.text
    assert validator(document, name).is_valid(body) is is_right
