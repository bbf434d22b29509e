"""Unsupported tool schemas are refused by the tool's name."""

import json
from typing import Any

import httpx
import pytest
from refusals import assert_refused
from running import HTTP, Server
from small_grammars import nested_repeats, small_schema

CHAT, WAIT = "/v1/chat/completions", 60


def chat(server: Server, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8} | fields
    return HTTP.post(server.url + CHAT, json=body, timeout=WAIT)


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
def test_the_error_names_the_tool_with_an_unsupported_schema(tool_server: Server, stream: bool) -> None:
    good = tool("good", json.loads(small_schema("name")))
    slow = {"type": "object", "properties": {"a": {"type": "string", "pattern": nested_repeats(8)}}, "required": ["a"]}
    for tools, index in (([tool("slow", slow)], 0), ([good, tool("slow", slow)], 1)):
        response = chat(tool_server, tools=tools, tool_choice="required", stream=stream)
        assert_refused(response, f"tools[{index}].function.parameters", may_be_busy=True)
    missing = tool("missing", {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}, "required": ["a"]})
    response = chat(tool_server, tools=[good, missing], tool_choice="required", stream=stream)
    assert_refused(response, "tools[1].function.parameters")
    large = tool("large", {"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(4000)}})
    assert_refused(chat(tool_server, tools=[large]), "tools[0].function.parameters")
    assert chat(tool_server, tools=[good], tool_choice="required").status_code == 200
