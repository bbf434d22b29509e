"""Answers to chats in the format of other APIs: reasoning, and errors within streams."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi.responses import JSONResponse, StreamingResponse
from message_events import assembled

from outrider.server.http.answers.messages import MessageWriter
from outrider.server.http.answers.responses import ResponsesWriter
from outrider.server.http.answers.translated import Writer, translated
from outrider.server.http.requests.dialect import Dialect
from outrider.server.http.requests.messages import MESSAGES
from outrider.server.http.requests.protocol import ChatRequest
from outrider.server.http.requests.responses import RESPONSES, ResponsesRequest

HEAD = {"id": "7", "created": 1, "model": "small"}
DETAILS = {"reasoning_tokens": 2, "accepted_prediction_tokens": 1, "rejected_prediction_tokens": 3}
USAGE = {
    "prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14, "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": DETAILS,
}  # fmt: skip
CALLS = [
    {"index": index, "id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
    for index, (name, arguments) in enumerate([("f", '{"x": 123456789012345678901234567890}'), ("g", "{}")])
]
PARTS: dict[str, list[dict[str, Any]]] = {
    "text": [{"content": " A"}, {"content": "  "}, {"content": "fox. "}],
    "space": [{"content": "\n"}, {"content": " "}],
    "all": [
        {"reasoning_content": "Let"}, {"reasoning_content": " me"}, {"content": "\n\n"}, {"content": "Well.\n"},
        {"tool_calls": [CALLS[0]]}, {"content": "\n"}, {"tool_calls": [CALLS[1]]},
    ],
    "calls": [{"content": "\n\n"}, {"tool_calls": CALLS}],
}  # fmt: skip


def writers() -> list[tuple[Writer, Dialect]]:
    chat = ChatRequest(model="small", messages=[{"role": "user", "content": "Hi"}])
    responses = ResponsesWriter(ResponsesRequest(input="Hi"), chat)
    return [(MessageWriter(omit_thinking=False), MESSAGES), (responses, RESPONSES)]


def whole(parts: list[dict[str, Any]], finish: str, writer: Writer, dialect: Dialect) -> dict[str, Any]:
    message: dict[str, Any] = {"reasoning_content": "", "content": ""}
    for part in itertools.takewhile(lambda part: "tool_calls" not in part, parts):  # SGLang drops text after calls
        for name, text in part.items():
            message[name] += text
    calls = [call for part in parts for call in part.get("tool_calls", ())]
    choice = {"index": 0, "message": message | {"tool_calls": calls}, "finish_reason": finish}
    answer = asyncio.run(translated(JSONResponse(HEAD | {"choices": [choice], "usage": USAGE}), writer, dialect))
    return json.loads(answer.body)


def events(bodies: list[dict[str, Any]], writer: Writer, dialect: Dialect) -> list[dict[str, Any]]:
    async def chunks() -> AsyncIterator[str]:
        for body in bodies:
            yield f"data: {json.dumps(body)}\n\n"
        yield "data: [DONE]\n\n"

    async def read() -> list[dict[str, Any]]:
        answer = await translated(StreamingResponse(chunks()), writer, dialect)
        assert isinstance(answer, StreamingResponse)
        texts = [bytes(event).decode() async for event in answer.body_iterator]  # type: ignore[arg-type]
        sent = [json.loads(text.partition("data: ")[2]) for text in texts]
        assert [text.partition("\n")[0] for text in texts] == [f"event: {event['type']}" for event in sent]
        return sent

    return asyncio.run(read())


def stream(parts: list[dict[str, Any]], finish: str) -> list[dict[str, Any]]:
    deltas = [{"role": "assistant", "content": ""}, *parts]
    chunks = [HEAD | {"choices": [{"index": 0, "delta": delta}], "usage": USAGE} for delta in deltas]
    del chunks[0]["usage"]
    last = {"index": 0, "delta": {}, "finish_reason": finish}
    return [*chunks, HEAD | {"choices": [last]}, HEAD | {"choices": [], "usage": USAGE}]


@pytest.mark.parametrize("finish", ["stop", "length", "tool_calls"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_streams_end_as_whole_answers(parts: list[dict[str, Any]], finish: str) -> None:
    for (of_whole, dialect), (of_stream, _) in zip(writers(), writers(), strict=True):
        answer = whole(parts, finish, of_whole, dialect)
        sent = events(stream(parts, finish), of_stream, dialect)
        times = {"created_at": 0, "completed_at": 0}
        assert of_stream.whole() | times == of_whole.whole() | times
        if dialect is MESSAGES:
            made = assembled(sent)
            assert (made["content"], made["stop_reason"]) == (answer["content"], answer["stop_reason"])
        else:
            calls = [item["arguments"] for item in answer["output"] if item["type"] == "function_call"]
            done = "response.function_call_arguments.done"
            assert [event["arguments"] for event in sent if event["type"] == done] == calls
            assert sent[-1]["response"]["output"] == answer["output"]
            assert [event["item"] for event in sent if event["type"] == "response.output_item.done"] == answer["output"]


def test_blocks_of_an_answer() -> None:
    (messages, _), (responses, _) = writers()
    content = whole(PARTS["all"], "tool_calls", messages, MESSAGES)["content"]
    assert content == [
        {"type": "thinking", "thinking": "Let me", "signature": ""},
        {"type": "text", "text": "\n\nWell.\n"},
        {"type": "tool_use", "id": "call_0", "name": "f", "input": {"x": 123456789012345678901234567890}},
        {"type": "tool_use", "id": "call_1", "name": "g", "input": {}},
    ]
    output = whole(PARTS["all"], "length", responses, RESPONSES)["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["status"] for item in output] == ["completed"] * 3 + ["incomplete"]
    (messages, _), (responses, _) = writers()
    assert [block["type"] for block in whole(PARTS["calls"], "stop", messages, MESSAGES)["content"]] == ["tool_use"] * 2
    assert whole(PARTS["space"], "stop", responses, RESPONSES)["output"][0]["content"][0]["text"] == "\n "


def test_a_response_begins_before_its_first_text() -> None:
    writer, dialect = writers()[1]
    error = {"error": {"message": "it ran too long", "type": "timeout_error", "param": None, "code": None}}
    sent = events([*stream(PARTS["text"], "stop")[:1], error], writer, dialect)
    assert [event["type"] for event in sent] == ["response.created", "response.in_progress", "response.failed"]
    assert sent[-1]["response"]["id"] == "resp_7"


def test_omitted_thinking_is_an_empty_block() -> None:
    writer = MessageWriter(omit_thinking=True)
    sent = events(stream(PARTS["all"], "stop"), writer, MESSAGES)
    assert writer.whole()["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert not [event for event in sent if event.get("delta", {}).get("type") == "thinking_delta"]


def test_error_within_a_stream_ends_it() -> None:
    error = {"error": {"message": "it ran too long", "type": "timeout_error", "param": None, "code": "request_timeout"}}
    for writer, dialect in writers():
        sent = events([*stream(PARTS["text"], "stop")[:3], error], writer, dialect)
        last = sent[-1]
        assert last["type"] in ("error", "response.failed")
        told = last["error"] if dialect is MESSAGES else last["response"]["error"]
        assert told["message"] == "it ran too long"
