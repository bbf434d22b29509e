"""Anthropic's /v1/messages and its count of tokens, as chats."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic_core import to_json

from ..errors import invalid_value, unsupported
from .bounds import MAX_MESSAGES, MAX_TOOLS
from .dialect import PASSED, Dialect, Strict, Translated, begin_chat, one_of, parse_own
from .protocol import CHAT


class TextBlock(Strict):
    type: Literal["text"]
    text: str


class DirectCaller(Strict):
    type: Literal["direct"]


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)
    caller: DirectCaller | None = None


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Strict):
    """signature: of another server's; this one needs none."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Strict):
    """Thinking that only the server that wrote it can read; left out."""

    type: Literal["redacted_thinking"]
    data: str


if TYPE_CHECKING:
    Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
else:
    Block = one_of(
        text=TextBlock,
        tool_use=ToolUseBlock,
        tool_result=ToolResultBlock,
        thinking=ThinkingBlock,
        redacted_thinking=RedactedThinkingBlock,
    )


class Message(Strict):
    """A last one of the assistant's is continued."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)] | None = None


class ToolOfMessages(Strict):
    """eager_input_streaming: all inputs are streamed as they come."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    eager_input_streaming: bool | None = None


class ToolChoiceOfMessages(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    type: Literal["adaptive", "disabled"]
    display: Literal["summarized", "omitted"] | None = None


class KeptThinking(Strict):
    """Accepted without effect: all thinking is kept."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Strict):
    edits: list[KeptThinking]


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Strict):
    """user_id: accepted without effect."""

    user_id: str | None = None


class CountTokensRequest(Strict):
    """Fields that decide the prompt."""

    messages: list[Message] = Field(max_length=MAX_MESSAGES, min_length=1, fail_fast=True)
    system: str | list[TextBlock] | None = None
    tools: list[ToolOfMessages] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoiceOfMessages | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: int
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None


UNSUPPORTED = {
    "container": "nothing runs here",
    "diagnostics": "leave it out",
    "inference_geo": "the server is where it is",
    "mcp_servers": "the server calls no tools; your program does",
    "prefill": "send a last message of the assistant's, which is continued",
}
NAMES = {
    "stop": "stop_sequences",
    r"response_format\.json_schema\.schema": "output_config.format.schema",
    "reasoning_effort": "output_config.effort",
    "user": "metadata.user_id",
    r"tool_choice\.function": "tool_choice",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
}
BLOCKS_OF = dict.fromkeys(("tool_use", "thinking", "redacted_thinking"), "assistant") | {"tool_result": "user"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _to_chat(model: type[CountTokensRequest], body: dict[str, Any]) -> Translated:
    _refuse_budget(body.get("thinking"))
    request = parse_own(model, body)
    chat, places = begin_chat(body, PASSED, _messages(request))
    messages = chat["messages"]
    if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        chat["continue_final_message"] = True
    if request.tools:
        chat["tools"] = [_tool(tool) for tool in request.tools]
    if (choice := request.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = named if choice.type == "tool" else CHOICES[choice.type]
        if choice.disable_parallel_tool_use:
            chat["parallel_tool_calls"] = False
    if (thinking := request.thinking) is not None:
        if thinking.type == "disabled":
            chat["reasoning_effort"] = "none"
        elif isinstance(kwargs := chat.get("chat_template_kwargs", {}), dict):
            chat["chat_template_kwargs"] = {"thinking": True, "enable_thinking": True} | kwargs
    if (config := request.output_config) is not None:
        if config.effort is not None and (thinking is None or thinking.type == "adaptive"):
            chat["reasoning_effort"] = config.effort
        if config.format is not None:
            schema = {"name": "answer", "schema": config.format.schema_, "strict": True}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(request, MessagesRequest):
        chat["max_tokens"] = request.max_tokens
        if request.stop_sequences:
            chat["stop"] = request.stop_sequences
        if request.metadata is not None and request.metadata.user_id is not None:
            chat["user"] = request.metadata.user_id
    return Translated(CHAT, chat, places, request)


def _refuse_budget(thinking: Any) -> None:
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        reason = "a budget of thinking cannot be kept here; send {'type': 'adaptive'}, or 'disabled'"
        raise unsupported("thinking", f"'thinking': {reason}")


def _tool(tool: ToolOfMessages) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema}
    optional = {"description": tool.description, "strict": tool.strict}
    return {"type": "function", "function": function | {k: v for k, v in optional.items() if v is not None}}


def _messages(request: CountTokensRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a chat's messages, each with the place that it comes from."""
    if request.system:
        texts = [request.system] if isinstance(request.system, str) else [block.text for block in request.system]
        yield "system", {"role": "system", "content": "\n".join(texts)}
    for index, message in enumerate(request.messages):
        for translated in _split(message, f"messages[{index}]"):
            yield f"messages[{index}]", translated


def _split(message: Message, place: str) -> Iterator[dict[str, Any]]:
    """Yield a message as a chat's: one, except results of tools, which are separate messages there."""
    if message.content is None and message.role != "assistant":
        yield {"role": message.role}  # which is refused
        return
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    texts: list[str] = []
    rest: dict[str, Any] = {}
    results = False
    for index, block in enumerate(message.content or ()):
        if (whose := BLOCKS_OF.get(block.type, message.role)) != message.role:
            where = f"{place}.content[{index}]"
            raise invalid_value(where, f"{where!r} is {block.type!r}, which only messages of role {whose!r} have")
        if isinstance(block, ToolResultBlock):
            if texts or rest:
                yield _message(message.role, texts, rest)
            texts, rest, results = [], {}, True
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": to_json(block.input).decode()}
            calls = rest.setdefault("tool_calls", [])
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ThinkingBlock):
            rest["reasoning_content"] = rest.get("reasoning_content", "") + block.thinking
        elif isinstance(block, TextBlock):
            texts.append(block.text)
    if texts or rest or not results:
        yield _message(message.role, texts, rest)


def _message(role: str, texts: list[str], rest: dict[str, Any]) -> dict[str, Any]:
    content: Any = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    if not texts:
        return {"role": role, **rest} if "tool_calls" in rest else {"role": role, "content": "", **rest}
    return {"role": role, "content": content, **rest}


def _result(block: ToolResultBlock) -> str:
    content = block.content or ("error" if block.is_error else "")
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


MESSAGES = Dialect(MessagesRequest, PASSED, lambda body: _to_chat(MessagesRequest, body), NAMES, UNSUPPORTED)
COUNT = Dialect(
    CountTokensRequest,
    frozenset(("model", "chat_template_kwargs")),
    lambda body: _to_chat(CountTokensRequest, body),
    NAMES,
    UNSUPPORTED,
)
