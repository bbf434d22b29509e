"""One client's grammars, tool schemas among them, cannot hurt the server or other clients."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from metrics_page import metric
from running import Server
from small_grammars import nested_repeats, slow_schema, small_schema

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WAIT = 60


def text(server: Server, **fields: Any) -> httpx.Response:
    return httpx.post(server.url + TEXT, json={"prompt": "Hello", "max_tokens": 8} | fields, timeout=WAIT)


def chat(server: Server, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8} | fields
    return httpx.post(server.url + CHAT, json=body, timeout=WAIT)


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def assert_refused(response: httpx.Response, param: str, *, may_be_busy: bool = False) -> None:
    """A 400 that names the field; may_be_busy: or a 503, where others computed too."""
    error = response.json()["error"]
    if may_be_busy and response.status_code == 503:
        assert error["code"] == "grammars_busy"
        return
    assert response.status_code == 400, response.text
    assert error["code"] == "invalid_grammar", error
    assert error["param"] == param
    assert "\n" not in error["message"]


def engine_memory(server: Server) -> int:
    """Bytes of the server's processes that stay, in all."""
    main = psutil.Process(server.process.pid)
    return sum(process.memory_info().rss for process in [main, *server.children().values()])


def test_eight_grammars_of_nested_repeats_do_not_hold_up_others(server: Server) -> None:
    many = [f"({'|'.join(nested_repeats(8, f'x{index}') for _ in range(30))})*" for index in range(8)]
    assert all(1500 < len(grammar) < 4000 for grammar in many)
    text(server)
    with ThreadPoolExecutor(8) as pool:
        begun = time.monotonic()
        attacks = [pool.submit(text, server, regex=grammar) for grammar in many]
        taken = []
        while not all(attack.done() for attack in attacks):
            before = time.monotonic()
            assert text(server).status_code == 200
            taken.append(time.monotonic() - before)
        for attack in attacks:
            assert_refused(attack.result(), "regex", may_be_busy=True)
        assert time.monotonic() - begun < 20  # 5 s on a machine of our own
    assert max(taken) < 5  # 1 s there; it was half a minute


def test_a_schema_that_takes_too_long_is_refused_in_seconds(server: Server) -> None:
    text(server, json_schema=small_schema("before"))
    before, begun = engine_memory(server), time.monotonic()
    response = text(server, json_schema=slow_schema())
    assert time.monotonic() - begun < 10  # 5 s on a machine of our own; it was 85
    assert_refused(response, "json_schema", may_be_busy=True)
    assert engine_memory(server) - before < 100 * 2**20  # it was 1.3 GB


def test_many_grammars_leave_little_behind(server: Server) -> None:
    text(server, json_schema=small_schema("before"))
    before = engine_memory(server)
    for index in range(200):
        assert text(server, json_schema=small_schema(f"name{index}"), max_tokens=2).status_code == 200
    assert 0 < metric(server.url, "outrider_grammar_cache_bytes") <= 64 * 2**20
    assert engine_memory(server) - before < 150 * 2**20  # 159 left half a gigabyte
    known = metric(server.url, "outrider_grammars_total", outcome="known")
    text(server, json_schema=small_schema("name199"))
    assert metric(server.url, "outrider_grammars_total", outcome="known") == known + 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "("}, "regex"),
        ({"regex": "a\0b"}, "regex"),
        ({"regex": nested_repeats(8)}, "regex"),
        ({"ebnf": 'root ::= root root | "a" | [a-z]* | root root root'}, "ebnf"),
        ({"json_schema": '{"type": "objekt"}'}, "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/a"}}}},
            "response_format.json_schema.schema",
        ),
    ],
    ids=["regex", "NUL", "slow regex", "ambiguous", "schema", "missing reference"],
)
def test_each_kind_is_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    assert_refused(text(server, **fields), param, may_be_busy="[a-z]" in str(fields))


@pytest.fixture(scope="module")
def tools_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("tools") / "log"
    started = Server(log, "--max-total-tokens", "4096", "--tool-call-parser", "qwen25")
    try:
        yield started.wait_until_ready()
    finally:
        started.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_whose_schema_cannot_be_followed_is_named(tools_server: Server, stream: bool) -> None:
    server = tools_server
    good = tool("good", json.loads(small_schema("name")))
    slow = {"type": "object", "properties": {"a": {"type": "string", "pattern": nested_repeats(8)}}, "required": ["a"]}
    for tools, index in (([tool("slow", slow)], 0), ([good, tool("slow", slow)], 1)):
        response = chat(server, tools=tools, tool_choice="required", stream=stream)
        assert_refused(response, f"tools[{index}].function.parameters", may_be_busy=True)
    missing = tool("missing", {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}, "required": ["a"]})
    response = chat(server, tools=[good, missing], tool_choice="required", stream=stream)
    assert_refused(response, "tools[1].function.parameters")
    large = tool("large", {"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(4000)}})
    assert_refused(chat(server, tools=[large]), "tools[0].function.parameters")
    assert chat(server, tools=[good], tool_choice="required").status_code == 200


def test_a_grammar_is_followed_whether_it_is_carried_or_compiled_again(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 30}}, "required": ["a"]}
    for given in (json.dumps(schema), small_schema("name")):
        for speculation in (True, False):
            response = text(server, json_schema=given, max_tokens=120, speculation={"enabled": speculation})
            if response.status_code == 503:  # others compute too
                continue
            answer = response.json()["choices"][0]
            if answer["finish_reason"] == "stop":
                assert isinstance(json.loads(answer["text"]), dict)
            assert answer["text"].lstrip().startswith("{")
