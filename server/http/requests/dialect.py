"""Requests of other APIs than chat completions: each is translated to a chat or a completion and checked as one."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core.core_schema import CoreSchema, tagged_union_schema

from .effect import with_effect
from .parsing import parse
from .protocol import CHAT, Kind, given_fields, reject_unknown_nested_fields

T = TypeVar("T", bound=BaseModel)

PASSED = frozenset(
    [
        *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "speculation", "min_tokens_per_second"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "min_tokens", "ignore_eos"),
        *("stop_token_ids", "no_stop_trim", "skip_special_tokens", "regex", "ebnf", "cache_salt"),
        "chat_template_kwargs",
    ]
)
"""Fields with the same meaning in a chat and in other APIs: OpenAI's, SGLang's and ours."""


class ByType:
    """Annotation of a union of models. A value's `type` selects its model; one with only a `role` is a message."""

    @classmethod
    def __get_pydantic_core_schema__(cls, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Tags differ from types: pydantic puts them into error locations, where a type could be taken for a field.
        models = {
            f"{name} object": handler.generate_schema(model)
            for model in get_args(union)
            for name in get_args(model.model_fields["type"].annotation)
        }
        return tagged_union_schema(models, _tag)


def _tag(value: Any) -> str:
    if not isinstance(value, dict):
        return f"{getattr(value, 'type', None)} object"
    return f"{value.get('type') or ('message' if 'role' in value else 'untyped')} object"


@dataclass(frozen=True, slots=True)
class Translated:
    """A request as another kind of request.

    body: its fields. places: place of each message in the original, for errors. original: the client's request, parsed.
    """

    kind: Kind
    body: dict[str, Any]
    places: Sequence[str] = ()
    original: BaseModel | None = None


def parse_own(model: type[T], body: dict[str, Any]) -> T:
    """Parse the fields of an API's own model. Raises ApiError."""
    request = parse(model.model_validate_json, {name: body[name] for name in body if name in model.model_fields})
    reject_unknown_nested_fields(request, body)
    return request


def to_chat(
    body: dict[str, Any],
    passed: frozenset[str],
    original: BaseModel,
    messages: Iterable[tuple[str, dict[str, Any]]],
    fields: dict[str, Any],
) -> Translated:
    """Make a chat. passed: names of fields that the body keeps. messages: each after its place in the original request.
    fields: further ones; empty ones are dropped."""
    placed = list(messages)
    chat = {name: value for name, value in body.items() if name in passed} | with_effect(fields)
    chat["messages"] = [message for _, message in placed]
    if body.get("stream"):
        chat["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return Translated(CHAT, chat, [place for place, _ in placed], original)


def chat_message(role: str, texts: Sequence[str] | None, rest: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's message. texts: its content; None: it is missing. rest: further fields; calls need no content."""
    if texts is None or ("tool_calls" in rest and not texts):
        return {"role": role} | rest
    content: Any = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts] or ""
    return {"role": role, "content": content} | rest


def chat_tool(name: str, description: str | None, parameters: Any, strict: bool | None) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def chat_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Dialect:
    """Another API.

    model: describes its own fields. passed: further fields, with the meaning that they have in a chat. unsupported:
    fields of the API that are refused, with the reason. names: patterns of chat fields, with their names in this API,
    for errors. translate: makes a chat of a body, or raises ApiError. ids: bodies may hold token ids.
    """

    model: type[BaseModel]
    passed: frozenset[str]
    translate: Callable[[dict[str, Any]], Translated]
    names: Mapping[str, str]
    unsupported: Mapping[str, str] = field(default_factory=dict)
    ids: bool = False

    def given_fields(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a body. Raises ApiError for a field that is not accepted."""
        return given_fields(body, self.model.model_fields.keys() | self.passed, self.unsupported, {})

    def renamed(self, message: str, param: str | None, places: Sequence[str] = ()) -> tuple[str, str | None]:
        """Return the text and field of a translated request's error, with the names and places of the original."""

        def place(match: re.Match[str]) -> str:
            index = int(match[1])
            return places[index] if index < len(places) else match[0]

        if places:
            message = re.sub(r"\bmessages\[(\d+)\][^' ]*", place, message)
            param = param and re.sub(r"^messages\[(\d+)\].*", place, param)
        for chat, original in self.names.items():
            message = re.sub(rf"(?<=['(]){chat}(?=['.)\[])", original, message)
            param = param and re.sub(rf"^{chat}(?=[.\[]|$)", original, param)
        return message, param
