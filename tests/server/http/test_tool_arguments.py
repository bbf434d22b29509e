"""A real model's arguments follow the tools' schemas and arrive complete; unsupported schemas are refused."""

import json
import re
from typing import Any

import httpx
import jsonschema
import pytest
from running import HTTP, Server
from small_grammars import assert_refused, nested_repeats

STRING = {"type": "string"}
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASKED = {"max_tokens": 100, "messages": [{"role": "user", "content": "Weather in Rome?"}]}
WIDE = 8
"""White space that JSON may have in a row."""


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def post(server: Server, route: str = "chat/completions", **fields: Any) -> httpx.Response:
    return HTTP.post(f"{server.url}/v1/{route}", json=ASKED | fields, timeout=60)


def first_call(server: Server, **fields: Any) -> tuple[str, str, str]:
    """Name, arguments and finish reason of the first call; streamed and whole must agree."""
    choice = post(server, **fields).json()["choices"][0]
    called = choice["message"]["tool_calls"][0]["function"]
    streamed = streamed_call(server, **fields)
    assert streamed == (called["name"], called["arguments"], choice["finish_reason"])
    return streamed


def streamed_call(server: Server, **fields: Any) -> tuple[str, str, str]:
    name = arguments = finish = ""
    for chunk in server.stream("chat/completions", ASKED | fields):
        for part in chunk["choices"]:
            finish = part["finish_reason"] or finish
            for call in part["delta"].get("tool_calls") or ():
                if call["index"] == 0:
                    name += call["function"]["name"] or ""
                    arguments += call["function"]["arguments"] or ""
    return name, arguments, finish


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_follows_its_tools_schema(tool_server: Server, choice: Any) -> None:
    tools = [tool("find_hotel", CITY), tool("get_weather", CITY)]
    names = {"get_weather"} if choice == NAMED else {"find_hotel", "get_weather"}
    for seed in range(2):
        name, arguments, finish = first_call(tool_server, tools=tools, tool_choice=choice, temperature=1, seed=seed)
        assert name in names
        jsonschema.validate(json.loads(arguments), CITY)
        assert finish in ("tool_calls", "length")


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"anyOf": [CITY, {"type": "array"}]},
        CITY | {"anyOf": [{"required": ["city"]}, {"required": ["town"]}]},
        CITY | {"properties": {"city": {"enum": ["Rome"], "pattern": "(?!P)\\w+"}, "n": {"uniqueItems": True}}},
    ],
    ids=["none", "empty", "branches", "branches beside properties", "not enforced"],
)
def test_arguments_are_an_object(tool_server: Server, parameters: Any) -> None:
    for seed in range(2):
        asked = {"tools": [tool("get_weather", parameters)], "tool_choice": "required", "temperature": 1, "seed": seed}
        _, arguments, finish = streamed_call(tool_server, **asked)
        assert arguments.startswith("{")
        if parameters and "properties" in parameters and finish != "length":
            assert json.loads(arguments)["city"] in ("Paris", "Rome")


def begins(server: Server, *texts: str) -> dict[str, int]:
    """Biases that make the model write these tokens."""
    ids = [server.post("tokenize", {"prompt": text})["tokens"] for text in texts]
    return {str(tokens[-1]): 100 for tokens in ids}


VALUES = ['a </tool_call> <tool_call>{"name": 1}', 'say "hi" \\ {x}', "🚉 é\n", "}", "", 120, 1.5, -7, True, None]


def test_constants_come_through(tool_server: Server) -> None:
    for last in ("</tool_call>", 1200):
        values = {f"k{index}": value for index, value in enumerate([*VALUES, last])}
        fields = {key: {"const": value} for key, value in values.items()}
        schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
        asked = {"tools": [tool("get_weather", schema)], "tool_choice": "required", "temperature": 0, "max_tokens": 300}
        name, arguments, _ = first_call(tool_server, **asked)
        assert (name, json.loads(arguments)) == ("get_weather", values)


@pytest.mark.parametrize(("choice", "stream"), [("auto", True), ("required", False)])
def test_unenforceable_schemas_of_strict_tools_are_refused(tool_server: Server, choice: str, stream: bool) -> None:
    cases = {
        "larger than": {"properties": {f"f{i}": STRING for i in range(4000)}},
        "none": {"$ref": "#/$defs/none"},
        "uniqueItems": {"type": "array", "items": STRING, "uniqueItems": True},
        "maxLength": STRING | {"pattern": "^[a-z]+$", "maxLength": 3},
        "(?=": STRING | {"pattern": "(?=a)b"},
        "'$' stands inside": STRING | {"pattern": "(a$|b)c"},
        "'allOf' with more": {"allOf": [STRING, {"maxLength": 3}]},
        "'properties' beside 'anyOf'": CITY | {"anyOf": [{"type": "object"}]},
        "'minimum' would be ignored": {"minimum": 3},
    }
    good = tool("good", CITY, strict=True)
    for named, field in cases.items():
        schema = {"type": "object", "properties": {"a": field}, "required": ["a"]}
        asked = {"tools": [good, tool("bad", schema, strict=True)], "tool_choice": choice}
        response = post(tool_server, stream=stream, **asked)
        assert_refused(response, "tools[1].function.parameters")
        assert named in response.text.replace('\\"', '"'), response.text
    assert post(tool_server, **asked | {"tool_choice": "none"}).status_code == 200
    assert post(tool_server, tools=[good], tool_choice=choice, max_tokens=8).status_code == 200


def test_a_slow_schema_of_a_tool_is_refused_by_its_place(tool_server: Server) -> None:
    slow = {"type": "object", "properties": {"a": STRING | {"pattern": nested_repeats(8)}}, "required": ["a"]}
    for others in ([], [tool("good", CITY, strict=True)]):
        tools = [*others, tool("slow", slow, strict=True)]
        response = post(tool_server, tools=tools, tool_choice="required", stream=True)
        assert_refused(response, f"tools[{len(others)}].function.parameters", may_be_busy=True)


def longest_space(text: str) -> int:
    """Longest run of white space outside strings."""
    text = re.sub(r'"(?:[^"\\]|\\.)*"?', '""', text)
    return max((len(space) for space in re.findall(r"\s+", text)), default=0)


def test_white_space_in_json_is_bounded(tool_server: Server) -> None:
    schema = {"type": "object", "properties": {"k": {"type": "array", "items": CITY}}, "required": ["k"]}
    asked = {"temperature": 0, "logit_bias": begins(tool_server, " ", "\n", "\t"), "max_tokens": 200}
    for stated in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}):
        answer = post(tool_server, response_format=stated, **asked).json()["choices"][0]
        assert answer["message"]["content"].strip()
        assert longest_space(answer["message"]["content"]) <= WIDE
    for strict in (False, True):
        tools = [tool("get_weather", CITY | {"additionalProperties": False}, strict=strict)]
        _, arguments, _ = first_call(tool_server, tools=tools, tool_choice=NAMED, **asked)
        jsonschema.validate(json.loads(arguments), CITY)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_is_cut_ends_for_its_length(tool_server: Server, choice: Any) -> None:
    schema = {"type": "object", "properties": {"text": STRING | {"minLength": 900}}, "required": ["text"]}
    for strict in (False, True):
        asked = {"tools": [tool("get_weather", schema, strict=strict)], "tool_choice": choice, "max_tokens": 40}
        assert post(tool_server, temperature=0, **asked).json()["choices"][0]["finish_reason"] == "length"
        assert streamed_call(tool_server, temperature=0, **asked)[2] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_other_apis_say_that_a_call_is_cut(tool_server: Server, stream: bool) -> None:
    schema = {"type": "object", "properties": {"text": STRING | {"minLength": 900}}, "required": ["text"]}
    asked = {"tools": [{"name": "get_weather", "input_schema": schema}], "tool_choice": {"type": "any"}}
    assert '"stop_reason":"max_tokens"' in post(tool_server, "messages", stream=stream, max_tokens=40, **asked).text
    function = {"type": "function", "name": "get_weather", "parameters": schema}
    body = {"input": "Weather?", "tools": [function], "tool_choice": "required", "max_output_tokens": 40}
    response = HTTP.post(f"{tool_server.url}/v1/responses", json=body | {"stream": stream}, timeout=60)
    assert '"incomplete_details":{"reason":"max_output_tokens"}' in response.text
    assert '"status":"incomplete"' in response.text
