"""Fields without an effect are dropped from requests of every API at any depth, and only these."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from asking import MODEL
from receiving import received

from outrider.server.http.errors import ApiError
from outrider.server.http.requests.dialect import Dialect
from outrider.server.http.requests.messages import COUNT, MESSAGES
from outrider.server.http.requests.protocol import CHAT, TEXT, ChatRequest, TextRequest
from outrider.server.http.requests.responses import RESPONSES
from outrider.server.http.requests.validation import Limits

LIMITS = Limits(
    max_body_bytes=100_000, model=MODEL, vocab_size=100, context_length=64, max_choices=4, has_tool_parser=True
)
FORMS = {
    "/v1/chat/completions": CHAT, "/v1/completions": TEXT, "/v1/messages": MESSAGES, "/v1/messages/count_tokens": COUNT,
    "/v1/responses": RESPONSES,
}  # fmt: skip
NOISE = {
    "unheard_of": None, "refusal": [], "audio": {},
    "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"},
    "annotations": [{"type": "url_citation", "url": "http://here"}], "encrypted_content": "gAAAAABo",
    "prompt_cache_key": "a", "safety_identifier": "b", "service_tier": "flex",
    "prediction": {"type": "content", "content": "Rain"},
}  # fmt: skip
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
NO_SCHEMA = {"type": "json_schema", "json_schema": {}}
SCHEMA = {"type": "object", "properties": {}, "default": None, "enum": [], "annotations": {"cache_control": []}}


def requests() -> list[tuple[str, dict[str, Any]]]:
    """All requests of clients that are answered."""
    files = Path(__file__).with_name("dialects").glob("*.json")
    recorded = [request for file in files for request in json.loads(file.read_text())["requests"]]
    answered = [request for request in recorded if not {"status", "method"} & request.keys()]
    return [(request["path"].partition("?")[0], request["body"]) for request in answered]


def with_noise(value: Any, name: str = "") -> Any:
    """A body with no-effect fields in all objects except the user's own."""
    if isinstance(value, list):
        return [with_noise(item, name) for item in value]
    if not isinstance(value, dict) or name in ("parameters", "input_schema", "schema", "metadata", "logit_bias"):
        return value
    if name == "input" and "type" not in value:
        return value
    noise = {key: inner for key, inner in NOISE.items() if key not in value}
    return {key: with_noise(inner, key) for key, inner in value.items()} | noise


def fields(request: ChatRequest | TextRequest) -> dict[str, Any]:
    kwargs = getattr(request, "chat_template_kwargs", None) or None
    empty = {"metadata": request.metadata or None, "chat_template_kwargs": kwargs}
    return request.model_dump() | empty | {"_original": request._original and request._original.model_dump()}


def test_fields_without_effect_are_dropped() -> None:
    recorded = requests()
    assert {path for path, _ in recorded} == FORMS.keys()
    for path, body in recorded:
        noisy = with_noise(copy.deepcopy(body))
        assert json.dumps(noisy).count("unheard_of") > ("messages" in body)
        assert fields(received(FORMS[path], noisy, LIMITS)) == fields(received(FORMS[path], body, LIMITS))


@pytest.mark.parametrize("nothing", [None, [], {}], ids=str)
def test_every_optional_field_may_be_empty(nothing: Any) -> None:
    for kind, prompt in ((CHAT, HELLO), (TEXT, {"prompt": "Hello"})):
        plain = fields(received(kind, prompt, LIMITS))
        names = (kind.model.model_fields.keys() | kind.unsupported.keys()) - {"messages", "prompt"}
        assert fields(received(kind, prompt | dict.fromkeys(names, nothing), LIMITS)) == plain
    for dialect, body in ((MESSAGES, HELLO | {"max_tokens": 2}), (RESPONSES, {"input": "Hello"})):
        names = {*dialect.model.model_fields, *dialect.passed, *dialect.unsupported} - body.keys()
        checked = [received(dialect, given, LIMITS) for given in (body, body | dict.fromkeys(names, nothing))]
        plain, empty = (fields(request) | {"_original": None} for request in checked)
        assert empty == plain


def test_the_users_own_objects_stay() -> None:
    function = {"name": "f", "parameters": SCHEMA, "strict": None}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    kwargs = {"chat_template_kwargs": {"documents": [], "mode": None}}
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": None, "citations": []}}}]
    body = {"messages": [*HELLO["messages"], {"role": "assistant", "tool_calls": calls}, *HELLO["messages"]]}
    body |= {"tools": [{"type": "function", "function": function}], "response_format": form, "tool_choice": "none"}
    chat = received(CHAT, body | kwargs, LIMITS)
    assert isinstance(chat, ChatRequest)
    assert chat.tools[0].function.parameters == SCHEMA
    assert chat.response_format.json_schema.schema_ == SCHEMA
    assert chat.chat_template_kwargs == kwargs["chat_template_kwargs"]
    assert chat.messages[1].tool_calls[0].function.arguments == {"x": None, "citations": []}

    use = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": None, "y": [], "z": {}}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "sunny"}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    asked = {"messages": HELLO["messages"] + turns, "tools": [{"name": "f", "input_schema": SCHEMA}], "max_tokens": 2}
    asked |= {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    chat = received(MESSAGES, asked, LIMITS)
    assert chat.tools[0].function.parameters == chat.response_format.json_schema.schema_ == SCHEMA
    assert json.loads(chat.messages[1].tool_calls[0].function.arguments) == use["input"]
    answer = chat.messages[2]
    assert (answer.role, answer.tool_call_id, answer.content) == ("tool", "a", "sunny")

    notes = {"citations": "three", "service_tier": "none"}
    wanted = {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}
    chat = received(RESPONSES, {"input": "Hello", "metadata": notes} | wanted, LIMITS)
    assert (chat._original.metadata, chat.response_format.json_schema.schema_) == (notes, SCHEMA)
    chat = received(RESPONSES, {"input": "Hello", "text": {"format": {"type": "json_object"}}}, LIMITS)
    assert chat.response_format.type == "json_object"


@pytest.mark.parametrize(
    ("form", "body", "param"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": {}}, "messages"),
        (TEXT, {"prompt": []}, "prompt"),
        (RESPONSES, {"input": []}, "input"),
        (MESSAGES, {"messages": [], "max_tokens": 2}, "messages"),
        (CHAT, HELLO | {"stop": [None]}, "stop[0]"),
        (CHAT, {"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0]"),
        (CHAT, HELLO | {"tools": [{}]}, "tools[0].function"),
        (CHAT, HELLO | {"response_format": NO_SCHEMA}, "response_format.json_schema.schema"),
        (CHAT, HELLO | {"unheard_of": False}, "unheard_of"),
        (CHAT, {"messages": [{"role": "assistant", "refusal": "No."}]}, "messages[0].refusal"),
        (MESSAGES, {"messages": [{"role": "user", "content": []}], "max_tokens": 2}, "messages[0]"),
        (RESPONSES, {"input": [{"role": "user"}]}, "input[0]"),
        (RESPONSES, {"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments"),
        (CHAT, HELLO | {"verbosity": "low"}, "verbosity"),
        (CHAT, HELLO | {"store": True}, "store"),
        (CHAT, HELLO | {"top_logprobs": 1}, "top_logprobs"),
        (CHAT, HELLO | {"continue_final_message": True}, "continue_final_message"),
        (CHAT, HELLO | {"x": [[[[[[[[[[[[[[[[[[[[[[{}]]]]]]]]]]]]]]]]]]]]]]}, "x"),
    ],
)
def test_missing_and_wrong_fields_are_still_refused(form: Any, body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        received(form, body, LIMITS)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 0},
        {"stream_options": {"include_usage": True}},
        {"verbosity": "medium"},
        {"suffix": ""},
        {"return_hidden_states": False, "routed_experts_start_len": 0},  # sent by SGLang's router
        {"metadata": {"a": "b"}},
    ],
)
def test_options_without_effect_are_accepted(fields: dict[str, Any]) -> None:
    received(CHAT, HELLO | fields, LIMITS)


def test_a_continued_message_of_parts_is_one_text() -> None:
    parts = [{"type": "text", "text": "One,"}, {"type": "text", "text": "two,\n"}]
    for last, kept in (({"content": parts}, "One, two,\n"), ({"content": "One, "}, "One, "), ({}, None)):
        turns = {"messages": [*HELLO["messages"], {"role": "assistant", **last}], "continue_final_message": True}
        assert received(CHAT, turns, LIMITS).messages[-1].content == kept


def test_items_of_responses_are_messages() -> None:
    """Earlier answers, and items without a message around them."""
    text = {"type": "output_text", "text": "Snow.", "annotations": [], "logprobs": []}
    items = [
        {"role": "user", "content": "What?"},
        {"type": "message", "id": "a", "role": "assistant", "status": "completed", "content": [text]},
        {"type": "input_text", "text": "Why?"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABo"},
        {"type": "output_text", "text": "Rain."},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": []},
    ]
    fields = {"reasoning": {"summary": "detailed"}, "truncation": "auto", "max_tool_calls": 3, "service_tier": "flex"}
    chat = received(RESPONSES, {"input": items} | fields, LIMITS)
    messages = [(message.role, message.content) for message in chat.messages]
    earlier = [("user", "What?"), ("assistant", "Snow.")]
    assert messages == [*earlier, ("user", "Why?"), ("assistant", "Rain."), ("tool", "")]
    assert len(chat.messages[3].tool_calls) == 1


ANY = HELLO | {"max_tokens": 2, "tools": [{"name": "f", "input_schema": SCHEMA}]}
ITEM = {"input": "Hello", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}


@pytest.mark.parametrize(
    ("form", "body", "choice", "meant"),
    [
        (MESSAGES, ANY, {"type": "auto"}, "auto"),
        (MESSAGES, ANY, {"type": "any"}, "required"),
        (MESSAGES, ANY, {"type": "none"}, "none"),
        (MESSAGES, ANY, {"type": "tool", "name": "f"}, "f"),
        (RESPONSES, ITEM, "required", "required"),
        (RESPONSES, ITEM, "none", "none"),
        (RESPONSES, ITEM, {"type": "function", "name": "f"}, "f"),
    ],
)
def test_choices_of_tools(form: Dialect, body: dict[str, Any], choice: Any, meant: str) -> None:
    made = received(form, body | {"tool_choice": choice}, LIMITS).tool_choice
    assert (made if isinstance(made, str) else made.function.name) == meant
