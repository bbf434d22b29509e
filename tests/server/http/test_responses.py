"""OpenAI's /v1/responses: a chat's answers in its format, streamed and whole."""

import json
from typing import Any

import openai
import pytest
from asking import MODEL
from running import Server
from two_tools import TOOLS

STORY = "Tell me a story about a fox."
ASKED: dict[str, Any] = {"model": MODEL, "input": STORY, "max_output_tokens": 24, "temperature": 0}
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]


def streamed(client: openai.OpenAI, asked: dict[str, Any]) -> tuple[Any, list[Any]]:
    events = list(client.responses.create(**asked, stream=True))
    return events[-1].response, events


def alike(response: Any) -> dict[str, Any]:
    """An answer without ids and cache counts."""
    output = [item.model_dump(exclude={"id", "call_id"}) for item in response.output]
    for item in output:
        for part in item.get("content") or ():
            part.pop("parsed", None)
        item.pop("parsed_arguments", None)
    usage = response.usage
    return {
        "output": output,
        "status": (response.status, response.incomplete_details and response.incomplete_details.reason),
        "tokens": (usage.input_tokens, usage.output_tokens, usage.total_tokens),
    }


def test_answers_equal_a_chats_streamed_and_whole(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": STORY}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, temperature=0)
    assert client.responses.create(**ASKED | {"input": "no " * 2000, "max_output_tokens": 1}).usage.input_tokens > 2000
    asked = ASKED | {"instructions": "Be brief."}
    whole = client.responses.create(**asked)
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 24)
    assert (whole.instructions, whole.max_output_tokens, whole.store) == ("Be brief.", 24, False)
    final, events = streamed(client, asked)
    assert alike(final) == alike(whole)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events if "delta" not in event.type]
    assert kinds == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.incomplete",
    ]


def test_speculation_and_logprobs(tool_server: Server) -> None:
    client = tool_server.client()  # it verifies every draft
    asked = ASKED | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(**asked)
    assert whole.usage.output_tokens_details.accepted_prediction_tokens > 0
    assert whole.metrics["speculative_decoding"]["num_spec_steps"] > 0
    plain = client.responses.create(**asked, extra_body={"speculation": {"enabled": False}})
    assert plain.usage.output_tokens_details.accepted_prediction_tokens == 0
    final, events = streamed(client, asked | {"extra_body": {"speculation": {"trace": True}}})
    for response in (plain, final):
        assert response.output_text == whole.output_text
        entries = response.output[0].content[0].logprobs
        assert "".join(entry.token for entry in entries) == whole.output_text
        assert {len(entry.top_logprobs) for entry in entries} == {2}
    traced = [token for event in events for token in (getattr(event, "speculation", None) or {}).get("trace", ())]
    assert "".join(token["token"] for token in traced) == whole.output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": "a"}] * 2049}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": "a", "x": 1}]}, "input[0].x"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]}, "input[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}}, "text.format.schema"),
        ({"n": 2}, "n"),
        ({"max_tokens": 2}, "max_tokens"),
    ],
)
def test_unsupported_fields_are_refused_by_name(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        body = json.loads(json.dumps(ASKED | fields | {"stream": stream}))
        with pytest.raises(openai.BadRequestError) as refused:
            client.post("/responses", body=body, cast_to=object)
        assert refused.value.param == param
        assert f"'{param}" in refused.value.message
