"""Invalid requests are refused with a 4xx in OpenAI's format."""

import json

import httpx
import pytest
from running import HTTP, Server

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: object) -> dict[str, object]:
    return {"messages": HELLO, "max_tokens": 4} | fields


def text(**fields: object) -> dict[str, object]:
    return {"prompt": "Hello", "max_tokens": 4} | fields


def says(**fields: object) -> dict[str, object]:
    return chat(messages=[{"role": "user", "content": "x"} | fields])


def schema(content: object) -> dict[str, object]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": content}})


FORM, KWARGS = "response_format.json_schema.schema", "chat_template_kwargs"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DEEP = [{"function": {"name": "f", "arguments": '{"a":' + "[" * 99 + "]" * 99 + "}"}}]
IMAGE = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]
NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x"}}
# id: (route, body, param, a part of the message)
CASES: dict[str, tuple[str, object, str | None, str]] = {
    "not an object": (CHAT, [1], None, "an array"),
    "unknown field": (CHAT, chat(temprature=1), "temprature", "did you mean 'temperature'"),
    "unknown field in a message": (CHAT, says(contnt="y"), "messages[0].contnt", "did you mean 'content'"),
    "unknown field in speculation": (CHAT, chat(speculation={"enable": True}), "speculation.enable", "enable"),
    "unknown field in stream_options": (
        CHAT, chat(stream=True, stream_options={"includ_usage": True}), "stream_options.includ_usage", "include_usage",
    ),
    "stored answers": (CHAT, chat(store=True), "store", "no answer is stored"),
    "field of OpenAI's we lack": (CHAT, chat(verbosity="low"), "verbosity", "does not support"),
    "code in a request": (CHAT, chat(custom_logit_processor="x"), "custom_logit_processor", "does not support"),
    "parameters past our own": (CHAT, chat(custom_params={"a": 1}), "custom_params", "speculation"),
    "stalling pattern": (CHAT, chat(stop_regex="(a+)+$"), "stop_regex", "does not support"),
    "adapter": (CHAT, chat(lora_path="x"), "lora_path", "does not support"),
    "disaggregation": (TEXT, text(bootstrap_host="10.0.0.1"), "bootstrap_host", "does not support"),
    "no messages": (CHAT, {"max_tokens": 4}, "messages", "required"),
    "empty messages": (CHAT, chat(messages=[]), "messages", "required"),
    "messages of a wrong type": (CHAT, chat(messages="hi"), "messages", "array"),
    "message of a wrong type": (CHAT, chat(messages=["hi"]), "messages[0]", "object"),
    "unknown role": (CHAT, chat(messages=[{"role": "boss", "content": "x"}]), "messages[0].role", "user"),
    "no content": (CHAT, says(content=None), "messages[0].content", "required"),
    "content of a wrong type": (CHAT, says(content=3), "messages[0].content", "string"),
    "image": (CHAT, says(content=IMAGE), "messages[0].content[0]", "text only"),
    "temperature as a string": (CHAT, chat(temperature="hot"), "temperature", "number"),
    "number as a string": (CHAT, chat(max_tokens="5"), "max_tokens", "integer"),
    "boolean as a number": (CHAT, chat(stream=1), "stream", "boolean"),
    "negative temperature": (CHAT, chat(temperature=-1), "temperature", "from 0 to 100"),
    "top_p of zero": (CHAT, chat(top_p=0), "top_p", "0.000001 to 1"),
    "penalty out of range": (CHAT, chat(presence_penalty=9), "presence_penalty", "from -2 to 2"),
    "n of zero": (CHAT, chat(n=0), "n", "from 1 to 16"),
    "n too large": (CHAT, chat(n=100_000), "n", "from 1 to 16"),
    "too many choices": (TEXT, text(prompt=["a"] * 10, n=2), "prompt", "20 choices"),
    "max_tokens of zero": (CHAT, chat(max_tokens=0), "max_tokens", "from 1"),
    "prompt beyond the context": (CHAT, chat(messages=[{"role": "user", "content": "no " * 5000}]), None, "context"),
    "prompt beyond the context, streamed": (TEXT, text(prompt="no " * 5000, stream=True), None, "context"),
    "no prompt": (TEXT, {"max_tokens": 4}, "prompt", "required"),
    "empty prompt": (TEXT, text(prompt=""), "prompt", "empty"),
    "empty prompt among others": (TEXT, text(prompt=["a", ""]), "prompt", "empty"),
    "prompt of no token": (TEXT, text(prompt="\u0006\u0004"), "prompt", "no token"),
    "prompt of no token among others": (TEXT, text(prompt=["a", "\u0006"]), "prompt", "no token"),
    "streamed prompt of no token": (TEXT, text(prompt="\u0006", stream=True), "prompt", "no token"),
    "token id beyond the vocabulary": (TEXT, text(prompt=[1, 10_000_000]), "prompt", "token ids"),
    "negative token id": (TEXT, text(prompt=[-1]), "prompt", "token ids"),
    "best_of": (TEXT, text(best_of=3), "best_of", "does not support"),
    "suffix": (TEXT, text(suffix="x"), "suffix", "does not support"),
    "nothing at all to answer": (TEXT, text(max_tokens=0), "max_tokens", "from 1"),
    "nothing to stream": (TEXT, text(max_tokens=0, echo=True, stream=True), "max_tokens", "from 1"),
    "top_logprobs alone": (CHAT, chat(top_logprobs=2), "top_logprobs", "logprobs=true"),
    "top_logprobs too many": (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "from 0 to 20"),
    "empty stop": (CHAT, chat(stop=["a", ""]), "stop", "empty"),
    "too many stops": (CHAT, chat(stop=["a"] * 33), "stop", "32"),
    "bias of an unknown token": (CHAT, chat(logit_bias={"999999": 1}), "logit_bias", "token ids"),
    "bias of no token": (CHAT, chat(logit_bias={"the": 1}), "logit_bias", "token ids"),
    "bias too large": (CHAT, chat(logit_bias={"5": 1e9}), "logit_bias", "-100 to 100"),
    "top_k beyond 32 bits": (CHAT, chat(top_k=2**31), "top_k", "2147483647"),
    "top_k of zero": (CHAT, chat(top_k=0), "top_k", "-1"),
    "fewest tokens beyond the most": (CHAT, chat(min_tokens=5), "min_tokens", "from 0 to 4"),
    "stop tokens too many": (CHAT, chat(stop_token_ids=[1] * 65), "stop_token_ids", "64 are allowed"),
    "bias of a token of many digits": (CHAT, chat(logit_bias={"9" * 5000: 1}), "logit_bias", "token ids"),
    "biases too many": (CHAT, chat(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias", "1024 are allowed"),
    "stops too long": (CHAT, chat(stop=["x" * 513] * 2), "stop", "1024 are allowed"),
    "messages too many": (CHAT, chat(messages=HELLO * 2049), "messages", "2048 are allowed"),
    "name of a user too long": (CHAT, chat(user="x" * 4097), "user", "4096 are allowed"),
    "tools too many": (CHAT, chat(tools=[TOOL] * 129), "tools", "128 are allowed"),
    "arguments nested too deeply": (
        CHAT, chat(messages=[*HELLO, {"role": "assistant", "tool_calls": DEEP}]),
        "messages[1].tool_calls[0].function.arguments", "64 deep",
    ),
    "seed as a fraction": (CHAT, chat(seed=1.5), "seed", "integer"),
    "seed too large": (CHAT, chat(seed=2**63), "seed", "64 bits"),
    "unknown format": (CHAT, chat(response_format={"type": "yaml"}), "response_format.type", "json_schema"),
    "schema missing": (CHAT, chat(response_format=NO_SCHEMA), FORM, "required"),
    "schema with an unknown type": (CHAT, schema({"type": "banana"}), FORM, "banana"),
    "schema we cannot hold": (CHAT, schema({"type": "array", "uniqueItems": True}), FORM, "uniqueItems"),
    "schema with a loose reference": (CHAT, schema({"$ref": "#/$defs/nothing"}), FORM, "nothing"),
    "schema too large": (CHAT, schema({"enum": ["x" * 100] * 1000}), FORM, "larger than"),
    "schema with an anchor inside": (CHAT, schema({"type": "string", "pattern": "a$b"}), FORM, "'$' stands inside"),
    "regex with an anchor inside": (CHAT, chat(regex="a$b"), "regex", "'$' stands inside"),
    "invalid regex": (CHAT, chat(regex="(["), "regex", "not valid"),
    "invalid grammar": (CHAT, chat(ebnf="root ::= ("), "ebnf", "not valid"),
    "two grammars": (CHAT, chat(ebnf='root ::= "a"', regex="a"), "ebnf", "exclude each other"),
    "tools without a parser": (CHAT, chat(tools=[TOOL]), "tools", "--tool-call-parser"),
    "template's own arguments": (CHAT, chat(chat_template_kwargs={"messages": "x"}), KWARGS, "which the server sets"),
    "template from outside": (CHAT, chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}), None, "chat_template"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_request_is_refused_with_the_reason(server: Server, name: str) -> None:
    route, body, param, message = CASES[name]
    response = HTTP.post(server.url + route, json=body, timeout=30)
    assert_error(response, 400, param=param, message=message)
    if name == "prompt beyond the context":
        assert response.json()["error"]["code"] == "context_length_exceeded"


def assert_error(response: httpx.Response, status: int, *, param: str | None = None, message: str = "") -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert "pydantic" not in error["message"]


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "streamed"])
def test_body_beyond_ten_megabytes(server: Server, declared: bool) -> None:
    body = json.dumps(text(prompt="x" * (10 * 2**20 + 1))).encode()
    content = body if declared else iter([body[start : start + 65536] for start in range(0, len(body), 65536)])
    with httpx.Client() as http:
        response = http.post(server.url + TEXT, content=content, headers={"Content-Type": "application/json"})
    assert_error(response, 413, message="larger than")


def test_body_just_below_ten_megabytes_is_read(server: Server) -> None:
    body = json.dumps(text(prompt="")) + " " * (10 * 2**20 - 200)
    response = HTTP.post(server.url + TEXT, content=body, headers={"Content-Type": "application/json"}, timeout=30)
    assert_error(response, 400, param="prompt", message="empty")


def test_unknown_model(server: Server) -> None:
    answer = HTTP.post(server.url + CHAT, json=chat(model="gpt-9"))
    assert_error(answer, 404, param="model", message="'gpt-9' is not served")
    assert answer.json()["error"]["code"] == "model_not_found"
    assert_error(HTTP.get(server.url + "/v1/models/gpt-9"), 404, param="model", message="gpt-9")


def test_unknown_route_and_method(server: Server) -> None:
    assert_error(HTTP.post(server.url + "/v1/nothing", json={}), 404, message="/v1/nothing")
    assert_error(HTTP.post(server.url + "/v1/embeddings", json={}), 404, message="generates text only")
    assert_error(HTTP.get(server.url + CHAT), 405, message="GET")


def test_null_and_off_mean_not_given(server: Server) -> None:
    response = HTTP.post(server.url + CHAT, json=chat(temperature=None, stop=None, audio=None, store=False), timeout=60)
    assert response.status_code == 200, response.text
