"""Tool calls of a real server are the same streamed, whole, with and without drafts."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
from running import HTTP, Server
from two_tools import TOOLS

PROMPT = "What is the weather in Paris for three days, and where is a hotel near the station?"


def ask(server: Server, *, stream: bool, drafts: bool, **fields: Any) -> tuple[str, list[tuple[str, str]], str, int]:
    """Content, calls, finish reason, and the number of accepted drafts."""
    asked: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": PROMPT}], "tools": TOOLS,
        "tool_choice": "required", "temperature": 0, "max_tokens": 160,
        "extra_body": {"speculation": {"enabled": drafts}}, **fields,
    }  # fmt: skip
    client = server.client()
    if not stream:
        whole = client.chat.completions.create(**asked)
        message = whole.choices[0].message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        kept = whole.usage.completion_tokens_details.accepted_prediction_tokens
        return message.content or "", calls, whole.choices[0].finish_reason, kept
    content, finish, kept, by_index = "", "", 0, {}
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked):
        if chunk.usage is not None:
            kept = chunk.usage.completion_tokens_details.accepted_prediction_tokens
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or ():
                name, arguments = by_index.get(call.index, ("", ""))
                function = call.function
                by_index[call.index] = name + (function.name or ""), arguments + (function.arguments or "")
    return content, [by_index[index] for index in sorted(by_index)], finish, kept


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find_hotel"}}])
def test_calls_are_the_same_streamed_and_whole_with_drafts_and_without(tool_server: Server, choice: Any) -> None:
    kinds = list(product((True, False), repeat=2))
    with ThreadPoolExecutor(len(kinds)) as pool:
        asked = pool.map(lambda kind: ask(tool_server, stream=kind[0], drafts=kind[1], tool_choice=choice), kinds)
        answers = dict(zip(kinds, asked, strict=True))
    calls = answers[False, False][1]
    assert calls
    assert all(json.loads(arguments) for _, arguments in calls)
    for (stream, drafts), (content, asked, finish, kept) in answers.items():
        assert asked == calls
        assert content == answers[stream, False][0]  # SGLang drops the text after whole calls
        assert finish == answers[False, False][2]
        assert (kept > 0) == drafts


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_requests_without_sampling_get_the_recommended_one(tool_server: Server, route: str) -> None:
    def text(**sampling: float) -> str:
        asked = {"prompt": PROMPT} if route == "completions" else {"messages": [{"role": "user", "content": PROMPT}]}
        choice = tool_server.post(route, {**asked, "max_tokens": 24, "seed": 5, **sampling})["choices"][0]
        return str(choice["text"] if route == "completions" else choice["message"]["content"])

    assert text() == text(temperature=0.2, top_p=0.9)
    assert text(temperature=1, top_p=1) == text(temperature=1, top_p=1.0) != text()
    assert text(temperature=0) == text(temperature=0, top_p=1)


def test_the_models_sampling_is_shown(tool_server: Server) -> None:
    expected = {"temperature": 0.2, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    name = "SmolLM2-135M-Instruct"
    assert HTTP.get(f"{tool_server.url}/v1/models/{name}").json()["default_parameters"] == expected
    schemas = HTTP.get(f"{tool_server.url}/openapi.json").json()["components"]["schemas"]
    for kind in ("ChatRequest", "TextRequest"):
        assert {field: schemas[kind]["properties"][field]["default"] for field in expected} == expected
    assert "Sampling by default: temperature 0.2, top_p 0.9 (from the model;" in tool_server.output()
