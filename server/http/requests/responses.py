"""OpenAI's /v1/responses as chats. The server stores no answers: a request holds its whole conversation."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from openai.types.responses import ResponseFormatTextJSONSchemaConfig, ToolChoiceFunction
from openai.types.shared import ResponseFormatJSONObject, ResponseFormatText
from pydantic import BaseModel, Field

from ..errors import unsupported
from .bounds import MAX_MESSAGES, MAX_TOOLS
from .dialect import PASSED, ByType, Dialect, Translated, chat_call, chat_message, chat_tool, parse_own, to_chat

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16


class TextPart(BaseModel):
    """logprobs: of an earlier answer; without effect."""

    type: Literal["input_text", "output_text"]
    text: str
    logprobs: list[dict[str, Any]] | None = None


class ReasoningPart(BaseModel):
    type: Literal["summary_text", "reasoning_text"]
    text: str


class RefusalPart(BaseModel):
    type: Literal["refusal"]
    refusal: str


class _Item(BaseModel):
    """id, status: as in answers; accepted without effect."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Annotated[TextPart | RefusalPart, ByType]], Field(fail_fast=True)] | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[TextPart] = ""


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: list[ReasoningPart] = Field(default_factory=list)
    content: list[ReasoningPart] | None = None


Item = Annotated[MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | TextPart, ByType]


class FunctionTool(BaseModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


Format = Annotated[ResponseFormatText | ResponseFormatJSONObject | ResponseFormatTextJSONSchemaConfig, ByType]


class TextConfig(BaseModel):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(BaseModel):
    """summary, generate_summary: accepted without effect; an answer holds the reasoning itself."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(BaseModel):
    """include: only `LOGPROBS` has an effect. stream_options, user, max_tool_calls (which counts calls of OpenAI's own
    tools) and truncation: accepted without effect. A prompt that does not fit is refused. metadata: returned with the
    answer."""

    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[FunctionTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | ToolChoiceFunction | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=MAX_METADATA)
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    stream_options: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: int | None = None
    user: str | None = None


STATELESS = "no answer is stored here; send all of the conversation as 'input'"
UNSUPPORTED = dict.fromkeys(("access_programs", "background_options", "image", "moderation"), "leave it out") | {
    "previous_response_id": STATELESS,
    "conversation": STATELESS,
    "prompt": "no prompt is stored here; send its text as 'instructions'",
    "context_management": "the server edits no prompt; send the items that count",
}
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    r"response_format\.json_schema\.schema": "text.format.schema",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    r"tools\[(\d+)\]\.function\.(\w+)": r"tools[\1].\2",
    "messages": "input",
}


def _to_chat(body: dict[str, Any]) -> Translated:
    if body.get("store") is True:
        raise unsupported("store", "this server does not support 'store': no answer is stored; send false, or nothing")
    request = parse_own(ResponsesRequest, body)
    choice = request.tool_choice
    fields: dict[str, Any] = {
        "max_completion_tokens": request.max_output_tokens,
        "tools": [chat_tool(tool.name, tool.description, tool.parameters, tool.strict) for tool in request.tools or ()],
        "tool_choice": {"type": "function", "function": {"name": choice.name}}
        if isinstance(choice, ToolChoiceFunction)
        else choice,
        "reasoning_effort": request.reasoning and request.reasoning.effort,
    }
    if request.text is not None and (form := request.text.format) is not None:
        fields["response_format"] = {"type": form.type}
        if isinstance(form, ResponseFormatTextJSONSchemaConfig):
            fields["response_format"]["json_schema"] = form.model_dump(exclude={"type"}, by_alias=True)
    if LOGPROBS in (request.include or ()) or request.top_logprobs:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return to_chat(body, RESPONSES.passed, request, _messages(request), fields)


RESPONSES = Dialect(
    ResponsesRequest, PASSED | {"parallel_tool_calls", "stop"}, _to_chat, NAMES, unsupported=UNSUPPORTED
)


def _messages(request: ResponsesRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a chat's messages, each with the place that it comes from. The assistant's items of one turn become one
    message."""
    if request.instructions:
        yield "instructions", {"role": "system", "content": request.instructions}
    if isinstance(request.input, str):
        yield "input", {"role": "user", "content": request.input}
        return
    place, turn = "", dict[str, list[Any]]()
    for index, item in enumerate(request.input):
        new = _turn(item)
        # In one turn reasoning comes first, then text, then calls.
        if turn and not ("tool_calls" in new or (new and turn.keys() == {"reasoning"})):
            yield place, _assistant(turn)
            turn = {}
        if not new:
            yield f"input[{index}]", _of_others(item)
            continue
        place = place if turn else f"input[{index}]"
        for name, parts in new.items():
            turn[name] = [*turn.get(name, ()), *parts]
    if turn:
        yield place, _assistant(turn)


def _turn(item: Item) -> dict[str, list[Any]]:
    """Return an item as part of the assistant's turn; {} for items of other roles."""
    match item:
        case FunctionCallItem():
            return {"tool_calls": [chat_call(item.call_id, item.name, item.arguments)]}
        case ReasoningItem():
            return {"reasoning": [part.text for part in item.content or item.summary]}
        case MessageItem(role="assistant"):
            return {"content": _texts(item.content)}
        case TextPart(type="output_text"):
            return {"content": [item.text]}
    return {}


def _assistant(turn: dict[str, list[Any]]) -> dict[str, Any]:
    rest: dict[str, Any] = {"tool_calls": turn["tool_calls"]} if "tool_calls" in turn else {}
    if "reasoning" in turn:
        rest["reasoning_content"] = "\n".join(filter(None, turn["reasoning"]))
    return chat_message("assistant", turn.get("content", ()), rest)


def _of_others(item: Item) -> dict[str, Any]:
    if isinstance(item, FunctionCallOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": "\n".join(_texts(item.output))}
    if isinstance(item, TextPart):
        return {"role": "user", "content": item.text}
    assert isinstance(item, MessageItem)
    return chat_message(item.role, None if item.content is None else _texts(item.content), {})


def _texts(content: str | Sequence[TextPart | RefusalPart] | None) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part.refusal if isinstance(part, RefusalPart) else part.text for part in content or ()]
