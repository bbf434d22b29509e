"""Anthropic's /v1/messages and its count of tokens, as chats."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic_core import to_json
from sglang.srt.entrypoints.anthropic.protocol import (
    AnthropicJSONOutputFormat,
    AnthropicToolChoice,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)

from ..errors import invalid_value, unsupported
from .bounds import MAX_MESSAGES, MAX_TOOLS
from .dialect import PASSED, ByType, Dialect, Translated, chat_call, chat_message, chat_tool, parse_own, to_chat


class ToolResultBlock(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock, ByType]


class Message(BaseModel):
    """A last one of the assistant's is continued. Redacted thinking, which only its server can read, is left out."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)] | None = None


class ToolOfMessages(BaseModel):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None


class Thinking(BaseModel):
    """`enabled` is refused: no budget can be kept."""

    type: Literal["adaptive", "disabled", "enabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class KeptThinking(BaseModel):
    """Accepted without effect: all thinking is kept."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(BaseModel):
    edits: list[KeptThinking]


class OutputConfig(BaseModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnthropicJSONOutputFormat | None = None


class CountTokensRequest(BaseModel):
    """Fields that decide the prompt."""

    messages: list[Message] = Field(max_length=MAX_MESSAGES, min_length=1, fail_fast=True)
    system: str | list[TextBlock] | None = None
    tools: list[ToolOfMessages] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None


class MessagesRequest(CountTokensRequest):
    """metadata: accepted without effect."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None


UNSUPPORTED = {
    "container": "nothing runs here",
    "mcp_servers": "the server calls no tools; your program does",
    "prefill": "send a last message of the assistant's, which is continued",
}
NAMES = {
    "stop": "stop_sequences",
    r"response_format\.json_schema\.schema": "output_config.format.schema",
    "reasoning_effort": "output_config.effort",
    r"tool_choice\.function": "tool_choice",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
}
BLOCKS_OF = dict.fromkeys(("tool_use", "thinking", "redacted_thinking"), "assistant") | {"tool_result": "user"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _to_chat(model: type[CountTokensRequest], body: dict[str, Any]) -> Translated:
    request = parse_own(model, body)
    config, choice = request.output_config or OutputConfig(), request.tool_choice
    thinking = request.thinking.type if request.thinking else ""
    if thinking == "enabled":
        reason = "a budget of thinking cannot be kept here; send {'type': 'adaptive'}, or 'disabled'"
        raise unsupported("thinking", f"'thinking': {reason}")
    kwargs = body.get("chat_template_kwargs")
    if thinking == "adaptive" and isinstance(kwargs, dict | None):
        kwargs = {"thinking": True, "enable_thinking": True} | (kwargs or {})
    schema = config.format and {"name": "answer", "schema": config.format.schema_, "strict": True}
    fields = {
        "tools": [
            chat_tool(tool.name, tool.description, tool.input_schema, tool.strict) for tool in request.tools or ()
        ],
        "tool_choice": choice and CHOICES.get(choice.type, {"type": "function", "function": {"name": choice.name}}),
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "chat_template_kwargs": kwargs,
        "reasoning_effort": "none" if thinking == "disabled" else config.effort,
        "response_format": schema and {"type": "json_schema", "json_schema": schema},
        "max_tokens": getattr(request, "max_tokens", None),
        "stop": getattr(request, "stop_sequences", None),
    }
    chat = to_chat(body, PASSED, request, _messages(request), fields)
    last = chat.body["messages"][-1]
    if last["role"] == "assistant" and "tool_calls" not in last:
        chat.body["continue_final_message"] = True
    return chat


def _messages(request: CountTokensRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a chat's messages, each with the place that it comes from."""
    if request.system:
        texts = [request.system] if isinstance(request.system, str) else [block.text for block in request.system]
        yield "system", {"role": "system", "content": "\n".join(texts)}
    for index, message in enumerate(request.messages):
        place = f"messages[{index}]"
        if isinstance(message.content, str):
            yield place, {"role": message.role, "content": message.content}
        elif message.content is None and message.role != "assistant":
            yield place, {"role": message.role}  # which is refused
        else:
            for translated in _split(message.role, message.content or (), place):
                yield place, translated


def _split(role: str, blocks: Sequence[Block], place: str) -> Iterator[dict[str, Any]]:
    """Yield the chat messages of a message: one, and one more for each result of a tool."""
    texts: list[str] = []
    rest: dict[str, Any] = {}
    results = False
    for index, block in enumerate(blocks):
        if (owner := BLOCKS_OF.get(block.type, role)) != role:
            where = f"{place}.content[{index}]"
            raise invalid_value(where, f"{where!r} is {block.type!r}, which only messages of role {owner!r} have")
        if isinstance(block, ToolResultBlock):
            if texts or rest:
                yield chat_message(role, texts, rest)
            texts, rest, results = [], {}, True
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
        elif isinstance(block, ToolUseBlock):
            call = chat_call(block.id, block.name, to_json(block.input).decode())
            rest.setdefault("tool_calls", []).append(call)
        elif isinstance(block, ThinkingBlock):
            rest["reasoning_content"] = rest.get("reasoning_content", "") + block.thinking
        elif isinstance(block, TextBlock):
            texts.append(block.text)
    if texts or rest or not results:
        yield chat_message(role, texts, rest)


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
