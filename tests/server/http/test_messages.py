"""Anthropic's /v1/messages: a chat's answers in its format, streamed and whole."""

import json
from typing import Any

import openai
import pytest
from asking import MODEL
from message_events import assembled
from metrics_page import metric
from running import HTTP, Server
from two_tools import TOOLS

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
WRONG_FORMAT = {"type": "json_schema", "schema": {"type": "x"}}
ASKED = {"model": MODEL, "messages": STORY, "max_tokens": 24, "temperature": 0}
CLIENT_TOOLS = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"], "strict": True} for tool in TOOLS
]


def says(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


def streamed(server: Server, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The assembled message, and its events."""
    answer = HTTP.post(f"{server.url}/v1/messages", json=body | {"stream": True}, timeout=120)
    assert answer.headers["content-type"].startswith("text/event-stream")
    pairs = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in events]
    return assembled(events), events


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
    whole = server.post("messages", ASKED)
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", MODEL)
    assert alike(whole) == {
        "content": [{"type": "text", "text": chat.choices[0].message.content}],
        "tokens": (chat.usage.prompt_tokens, 24),
        "stop": ("max_tokens", None),
    }
    message, events = streamed(server, ASKED)
    assert alike(message) == alike(whole)
    assert events[0]["message"]["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"] > 0
    assert server.post("messages/count_tokens", {"messages": STORY}) == {"input_tokens": chat.usage.prompt_tokens}


def test_speculation_is_reported_and_can_be_switched_off(tool_server: Server) -> None:
    server = tool_server  # it verifies every draft
    asked = ASKED | says({"type": "text", "text": "Say a b c a b c a b c."}) | {"speculation": {"trace": True}}
    whole = server.post("messages", asked)
    message, events = streamed(server, asked)
    for answer in (whole, message):
        details = answer["usage"]["output_tokens_details"]
        statistics = answer["metrics"]["speculative_decoding"]
        assert 0 < details["accepted_prediction_tokens"] == statistics["num_accepted_draft_tokens"]
    traced = [token for event in events for token in event.get("speculation", {}).get("trace", ())]
    text = whole["content"][0]["text"]
    assert "".join(token["token"] for token in traced) == text
    assert "".join(token["token"] for token in whole["speculation"]["trace"]) == text
    plain = server.post("messages", asked | {"speculation": {"enabled": False}})
    assert plain["usage"]["output_tokens_details"]["accepted_prediction_tokens"] == 0
    assert alike(plain) == alike(whole)


def test_stop_sequences_and_a_message_to_continue(server: Server) -> None:
    asked = ASKED | {"messages": [*STORY, {"role": "assistant", "content": "One, two, three, four,"}]}
    free = server.post("messages", asked)["content"][0]["text"]
    word = free.split()[2]
    asked["stop_sequences"] = [word]
    for answer in (server.post("messages", asked), streamed(server, asked)[0]):
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", word)
        assert answer["content"][0]["text"] == free[: free.index(word)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": STORY * 2049}, "messages"),
        ({"model": "claude-9"}, "model"),
        ({"n": 2}, "n"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"container": "a"}, "container"),
        ({"thinking": {"type": "adaptive"}, "chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"output_config": {"format": WRONG_FORMAT}}, "output_config.format.schema"),
        (says({"type": "image", "source": {}}), "messages[0].content[0]"),
        (says({"type": "text", "text": "a", "x": 1}), "messages[0].content[0].x"),
        (says({"type": "thinking", "thinking": "a"}), "messages[0].content[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "input_schema": {}}]}, "tools[0].type"),
        ({"speculation": {"enable": True}}, "speculation.enable"),
    ],
)
def test_errors_name_the_field_as_anthropics(server: Server, fields: dict[str, Any], param: str) -> None:
    status, kind = (404, "not_found_error") if param == "model" else (400, "invalid_request_error")
    for stream in (False, True):
        body = server.post("messages", ASKED | fields | {"stream": stream}, status)
        assert (body["type"], body["error"]["type"], body["error"]["param"]) == ("error", kind, param)
        assert body["request_id"]


def test_requests_are_counted_as_those_for_completions(server: Server) -> None:
    def completed() -> float:
        return metric(server.url, "outrider_request_seconds_count", outcome="completed")

    before = completed()
    answer = HTTP.post(f"{server.url}/v1/messages", json=ASKED, headers={"X-Request-Id": "mine"})
    assert answer.headers["request-id"] == "mine"
    assert completed() == before + 1
