"""OpenAI's /v1/responses as chats. The server stores no answers: a request holds its whole conversation."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ..errors import unsupported
from .bounds import MAX_MESSAGES, MAX_TOOLS
from .dialect import PASSED, Dialect, Strict, Translated, begin_chat, one_of, parse_own
from .protocol import CHAT

LOGPROBS = "message.output_text.logprobs"
INCLUDED = Literal[
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""OpenAI's; an answer has only the first of them."""
MAX_METADATA = 16


class InputText(Strict):
    type: Literal["input_text"]
    text: str


class OutputText(Strict):
    type: Literal["output_text"]
    text: str
    logprobs: list[dict[str, Any]] | None = None


class Refusal(Strict):
    type: Literal["refusal"]
    refusal: str


class SummaryText(Strict):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: str


if TYPE_CHECKING:
    Part = InputText | OutputText | Refusal
else:
    Part = one_of(input_text=InputText, output_text=OutputText, refusal=Refusal)


class _Item(Strict):
    """id, status: as in answers; accepted without effect."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_Item):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText] = ""


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: list[SummaryText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None


if TYPE_CHECKING:
    Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | InputText | OutputText
else:
    Item = one_of(
        message=MessageItem,
        function_call=FunctionCallItem,
        function_call_output=FunctionCallOutputItem,
        reasoning=ReasoningItem,
        input_text=InputText,
        output_text=OutputText,
    )


class FunctionTool(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Strict):
    type: Literal["function"]
    name: str


class PlainFormat(Strict):
    type: Literal["text", "json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(Strict):
    format: PlainFormat | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    """summary, generate_summary: accepted without effect; an answer holds the reasoning itself."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesStreamOptions(Strict):
    """include_obfuscation: accepted without effect."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Strict):
    """user, max_tool_calls (which counts calls of OpenAI's own tools) and truncation: accepted without effect. A prompt
    that does not fit is refused. metadata: returned with the answer."""

    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[FunctionTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[INCLUDED] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=MAX_METADATA)
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    stream_options: ResponsesStreamOptions | None = None
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
    chat, places = begin_chat(body, RESPONSES.passed, _messages(request))
    if request.max_output_tokens is not None:
        chat["max_completion_tokens"] = request.max_output_tokens
    if request.tools:
        chat["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in request.tools
        ]
    if isinstance(choice := request.tool_choice, NamedFunction):
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        chat["tool_choice"] = choice
    if request.text is not None and (form := request.text.format) is not None:
        chat["response_format"] = {"type": form.type}
        if isinstance(form, SchemaFormat):
            schema = form.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
            chat["response_format"]["json_schema"] = schema
    if request.reasoning is not None and request.reasoning.effort is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    if LOGPROBS in (request.include or ()) or request.top_logprobs:
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return Translated(CHAT, chat, places, request)


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
    turn: dict[str, Any] = {}
    place = ""
    for index, item in enumerate(request.input):
        of_assistant = (
            not isinstance(item, (FunctionCallOutputItem, InputText))
            and getattr(item, "role", "assistant") == "assistant"
        )
        if turn and (not of_assistant or not _continues(turn, item)):
            yield place, _turn(turn)
            turn = {}
        if not of_assistant:
            yield f"input[{index}]", _of_others(item)
            continue
        place = place if turn else f"input[{index}]"
        _add(turn, item)
    if turn:
        yield place, _turn(turn)


def _continues(turn: dict[str, Any], item: Item) -> bool:
    """Tell whether an item of the assistant's belongs to the turn: in one, reasoning comes first, then text, then
    calls."""
    if isinstance(item, FunctionCallItem):
        return True
    return "tool_calls" not in turn and "content" not in turn


def _add(turn: dict[str, Any], item: Item) -> None:
    if isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, ReasoningItem):
        texts = [part.text for part in item.content or item.summary]
        turn["reasoning_content"] = "\n".join(filter(None, [turn.get("reasoning_content"), *texts]))
    elif isinstance(item, OutputText):
        turn["content"] = item.text
    elif isinstance(item, MessageItem):
        turn["content"] = _content(item.content or "")


def _turn(turn: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", **({} if "tool_calls" in turn else {"content": ""}), **turn}


def _of_others(item: Item) -> dict[str, Any]:
    if isinstance(item, FunctionCallOutputItem):
        output = item.output if isinstance(item.output, str) else "\n".join(part.text for part in item.output)
        return {"role": "tool", "tool_call_id": item.call_id, "content": output}
    if isinstance(item, InputText):
        return {"role": "user", "content": item.text}
    assert isinstance(item, MessageItem)
    return {"role": item.role} | ({} if item.content is None else {"content": _content(item.content)})


def _content(content: str | Sequence[Part]) -> Any:
    if isinstance(content, str):
        return content
    texts = [part.refusal if isinstance(part, Refusal) else part.text for part in content]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts] or ""
