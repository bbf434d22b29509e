"""Anthropic's /v1/messages: a chat's answers in its format, streamed and whole."""

import json
from typing import Any

import openai
import pytest
from asking import MODEL
from metrics_page import metric
from running import HTTP, Server
from two_tools import TOOLS

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
ASKED = {"model": MODEL, "messages": STORY, "max_tokens": 24, "temperature": 0}
CLIENT_TOOLS = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"], "strict": True} for tool in TOOLS
]


def of_user(block: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [block]}]


def ask(server: Server, body: dict[str, Any], status: int = 200, path: str = "") -> dict[str, Any]:
    answer = HTTP.post(f"{server.url}/v1/messages{path}", json=body, timeout=120)
    assert answer.status_code == status, answer.text
    return answer.json()


def streamed(server: Server, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message as assembled by Anthropic's client, and its events."""
    answer = HTTP.post(f"{server.url}/v1/messages", json=body | {"stream": True}, timeout=120)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events, message, opened, inputs = [], {}, None, {}
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert (opened, event["index"]) == (None, len(message["content"]))
                opened = event["index"]
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert opened == event["index"]
                delta, content = event["delta"], message["content"][opened]
                if delta["type"] == "input_json_delta":
                    inputs[opened] = inputs.get(opened, "") + delta["partial_json"]
                else:
                    content[delta["type"].removesuffix("_delta")] += delta[delta["type"].removesuffix("_delta")]
            case "content_block_stop":
                opened = None
            case "message_delta":
                message |= event["delta"] | {name: event[name] for name in ("usage", "metrics") if name in event}
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    assert events[-1]["type"] == "message_stop"
    return message, events


def alike(message: dict[str, Any]) -> dict[str, Any]:
    """An answer without ids and cache counts."""
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    usage = message["usage"]
    return {
        "content": content,
        "tokens": (usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]),
        "stop": (message["stop_reason"], message["stop_sequence"]),
    }


def test_answers_equal_a_chats_streamed_and_whole(server: Server, client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(**ASKED)
    whole = ask(server, ASKED)
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", MODEL)
    assert alike(whole) == {
        "content": [{"type": "text", "text": chat.choices[0].message.content}],
        "tokens": (chat.usage.prompt_tokens, 24),
        "stop": ("max_tokens", None),
    }
    message, events = streamed(server, ASKED)
    assert alike(message) == alike(whole)
    assert events[0]["message"]["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"] > 0
    assert ask(server, {"messages": STORY}, path="/count_tokens") == {"input_tokens": chat.usage.prompt_tokens}


def test_speculation_is_reported_and_can_be_switched_off(tool_server: Server) -> None:
    server = tool_server  # it verifies every draft
    asked = ASKED | {
        "messages": [{"role": "user", "content": "Say a b c a b c a b c."}],
        "speculation": {"trace": True},
    }
    whole = ask(server, asked)
    message, events = streamed(server, asked)
    for answer in (whole, message):
        details = answer["usage"]["output_tokens_details"]
        assert details["accepted_prediction_tokens"] > 0
        assert (
            answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
            == (details["accepted_prediction_tokens"])
        )
    traced = [token for event in events for token in event.get("speculation", {}).get("trace", ())]
    text = whole["content"][0]["text"]
    assert "".join(token["token"] for token in traced) == text
    assert "".join(token["token"] for token in whole["speculation"]["trace"]) == text
    plain = ask(server, asked | {"speculation": {"enabled": False}})
    assert plain["usage"]["output_tokens_details"]["accepted_prediction_tokens"] == 0
    assert alike(plain) == alike(whole)


def test_stop_sequences_and_a_message_to_continue(server: Server) -> None:
    asked = ASKED | {"messages": [*STORY, {"role": "assistant", "content": "One, two, three, four,"}]}
    free = ask(server, asked)["content"][0]["text"]
    word = free.split()[2]
    for answer in (
        ask(server, asked | {"stop_sequences": [word]}),
        streamed(server, asked | {"stop_sequences": [word]})[0],
    ):
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", word)
        assert answer["content"][0]["text"] == free[: free.index(word)]


def test_tools_there_and_back(tool_server: Server) -> None:
    question = [{"role": "user", "content": "What is the weather in Paris, and where is a hotel near the station?"}]
    asked = ASKED | {"messages": question, "tools": CLIENT_TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 160}
    whole, (message, _) = ask(tool_server, asked), streamed(tool_server, asked)
    calls = [block for block in whole["content"] if block["type"] == "tool_use"]
    assert calls
    made = alike(message)["content"]
    assert [block for block in made if block["type"] == "tool_use"] == [
        {k: v for k, v in call.items() if k != "id"} for call in calls
    ]
    assert message["stop_reason"] == whole["stop_reason"]
    assert calls[0]["name"] in {tool["name"] for tool in CLIENT_TOOLS}
    assert calls[0]["input"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"} for call in calls]
    turns = [*question, {"role": "assistant", "content": whole["content"]}, {"role": "user", "content": results}]
    after = ask(tool_server, asked | {"messages": turns, "tool_choice": {"type": "none"}})
    assert after["stop_reason"] in ("end_turn", "max_tokens")
    before = ask(tool_server, {"messages": question, "tools": CLIENT_TOOLS}, path="/count_tokens")
    assert (
        before["input_tokens"]
        < ask(tool_server, {"messages": turns, "tools": CLIENT_TOOLS}, path="/count_tokens")["input_tokens"]
    )


def test_structured_output(server: Server) -> None:
    schema = {"type": "object", "properties": {"name": {"enum": ["Ann", "Bob"]}}, "required": ["name"]}
    schema["additionalProperties"] = False
    asked = ASKED | {"max_tokens": 64, "temperature": 1, "seed": 3}
    message = ask(server, asked | {"output_config": {"format": {"type": "json_schema", "schema": schema}}})
    assert json.loads(message["content"][0]["text"])["name"] in ("Ann", "Bob")


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"max_tokens": None}, 400, "max_tokens"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"messages": STORY * 2049}, 400, "messages"),
        ({"model": "claude-9"}, 404, "model"),
        ({"n": 2}, 400, "n"),
        ({"stop_sequences": [""]}, 400, "stop_sequences"),
        ({"temperature": -1}, 400, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 400, "thinking"),
        ({"container": "a"}, 400, "container"),
        ({"thinking": {"type": "adaptive"}, "chat_template_kwargs": [1]}, 400, "chat_template_kwargs"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            400,
            "output_config.format.schema",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
            400,
            "messages[0].content[0].x",
        ),
        ({"messages": of_user({"type": "thinking", "thinking": "a"})}, 400, "messages[0].content[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "input_schema": {}}]}, 400, "tools[0].type"),
        ({"speculation": {"enable": True}}, 400, "speculation.enable"),
    ],
)
def test_errors_name_the_field_as_anthropics(server: Server, fields: dict[str, Any], status: int, param: str) -> None:
    for stream in (False, True):
        body = ask(server, ASKED | fields | {"stream": stream}, status)
        assert body["type"] == "error"
        assert body["error"]["type"] == {400: "invalid_request_error", 404: "not_found_error"}[status]
        assert body["error"]["param"] == param
        assert body["request_id"]


def test_requests_are_counted_as_those_for_completions(server: Server) -> None:
    def completed() -> float:
        return metric(server.url, "outrider_request_seconds_count", outcome="completed")

    before = completed()
    answer = HTTP.post(f"{server.url}/v1/messages", json=ASKED, headers={"X-Request-Id": "mine"})
    assert answer.headers["request-id"] == "mine"
    assert completed() == before + 1
