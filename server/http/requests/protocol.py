"""Fields of requests: SGLang's request models with our additions, without unsupported fields.

A field that can change an answer is accepted or refused by name, never ignored.
"""

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import BaseModel, PrivateAttr, field_validator
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

from ...plugin.options import OwnDrafter
from ..errors import ApiError, unsupported


class SpeculationOptions(BaseModel):
    """enabled: false decodes this request without drafts. trace: report the source of each token."""

    enabled: bool = True
    trace: bool = False


class _Request(BaseModel):
    """Our additions to both kinds of request. metadata: accepted; no answer depends on it.

    _body_bytes: size of its body. _learn: the drafter may learn from its answer. _own: the drafter of its owner.
    _corpus, _stored: `RequestOptions.corpus` and `stored`. _original: another API's request that it was translated
    from.
    """

    _body_bytes: int = PrivateAttr(default=0)
    _learn: bool = PrivateAttr(default=False)
    _own: OwnDrafter = PrivateAttr(default=OwnDrafter())
    _original: Any = PrivateAttr(default=None)
    _corpus: str | None = PrivateAttr(default=None)
    _stored: bool = PrivateAttr(default=True)

    speculation: SpeculationOptions | None = None
    min_tokens_per_second: float | None = None
    metadata: dict[str, Any] | None = None


class ChatRequest(_Request, ChatCompletionRequest):
    """A chat. add_generation_prompt: vLLM's; it may be false only with `continue_final_message`."""

    add_generation_prompt: bool | None = None


class TextRequest(_Request, CompletionRequest):
    """A completion. add_special_tokens: for /v1/tokenize."""

    add_special_tokens: bool = True

    @field_validator("max_tokens")
    @classmethod
    def validate_max_tokens_positive(cls, value: int | None) -> int | None:
        return value  # SGLang's refuses the 0 that `validation.check` allows with `echo`


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHARED_FIELDS = _names(
    """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
    stream_options temperature top_p user metadata speculation min_tokens_per_second
    top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids no_stop_trim ignore_eos skip_special_tokens
    cache_salt return_cached_tokens_details return_spec_tokens_details
    """
)
CHAT_FIELDS = SHARED_FIELDS | _names(
    """
    messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls reasoning_effort
    chat_template_kwargs continue_final_message add_generation_prompt separate_reasoning stream_reasoning
    """
)
TEXT_FIELDS = SHARED_FIELDS | _names("prompt echo best_of json_schema return_token_ids")

# Fields of other servers that are unsupported here, with a reason where there is one.
UNSUPPORTED = dict.fromkeys(
    _names(
        """
        audio function_call functions modalities moderation suffix verbosity web_search_options
        """
    ),
    "leave it out",
) | {
    "store": "no answer is stored here; leave it out",
    "stop_regex": "a pattern could stall every other request; use stop",
    "custom_logit_processor": "requests may not bring code",
    "custom_params": "use the speculation field",
    "lora_path": "name the adapter as the model",
    "input_ids": "send messages; /v1/completions takes token ids as its prompt",
    "rid": "the server names requests itself",
}


MEANINGLESS: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "store": (False,),
    "suffix": ("",),
    "verbosity": ("medium",),
}
"""Values of unsupported fields without effect, in addition to the defaults of SGLang's models."""


@dataclass(frozen=True)
class Kind:
    """A kind of request. fields: accepted ones. ids: they may hold token ids."""

    model: type[ChatRequest] | type[TextRequest]
    fields: frozenset[str]
    ids: bool = False

    @cached_property
    def unsupported(self) -> dict[str, str]:
        """Fields that are refused, with the reason."""
        return dict.fromkeys(self.model.model_fields, "leave it out") | UNSUPPORTED

    @cached_property
    def meaningless(self) -> dict[str, tuple[Any, ...]]:
        """Values of refused fields without effect."""
        return {name: (field.default,) for name, field in self.model.model_fields.items()} | MEANINGLESS

    @property
    def is_answered(self) -> bool:
        """True if the model answers them."""
        return "max_tokens" in self.fields


LONGEST_NAME, LONGEST_PATH = 64, 256
"""Characters of an unknown field that are compared with known ones, and that are shown."""

CHAT = Kind(ChatRequest, CHAT_FIELDS)
TEXT = Kind(TextRequest, TEXT_FIELDS, ids=True)


def given_fields(
    body: dict[str, Any], known: Collection[str], refused: Mapping[str, str], meaningless: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Return the known fields at the top of a request. Raises ApiError for any other field with an effect.

    refused: fields that are refused, with the reason. meaningless: their values without effect.
    """
    for name, value in body.items():
        if name in known:
            continue
        if name not in refused:
            raise unknown_field(name, name, known)
        if value not in meaningless.get(name, ()):
            raise unsupported(name, f"this server does not support {name!r}: {refused[name]}")
    return {name: value for name, value in body.items() if name in known}


def reject_unknown_nested_fields(parsed: BaseModel, body: dict[str, Any]) -> None:
    """Refuse fields inside messages, tools, response_format …, which SGLang's models would drop."""
    for path, name, known in _unknown_fields(parsed, body, ""):
        raise unknown_field(f"{path}.{name}" if path else name, name, known)


def _unknown_fields(parsed: Any, raw: Any, path: str) -> Iterator[tuple[str, str, set[str]]]:
    """Walk a validated model together with its JSON: the model gives the type that a union resolved to."""
    if isinstance(parsed, BaseModel) and isinstance(raw, dict):
        fields = {field.alias or name: name for name, field in type(parsed).model_fields.items()}
        for key, value in raw.items():
            if key in fields:
                yield from _unknown_fields(getattr(parsed, fields[key]), value, f"{path}.{key}" if path else key)
            elif path:  # given_fields checks the top level
                yield path, key, set(fields)
    elif isinstance(parsed, list) and isinstance(raw, list):
        for index, (parsed_item, raw_item) in enumerate(zip(parsed, raw, strict=False)):
            yield from _unknown_fields(parsed_item, raw_item, f"{path}[{index}]")


def unknown_field(path: str, name: str, known: Iterable[str]) -> ApiError:
    """Return the error for an unknown field. path: its place. known: allowed names; the error suggests the nearest."""
    close = difflib.get_close_matches(name[:LONGEST_NAME], known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    path = path if len(path) <= LONGEST_PATH else path[:LONGEST_PATH] + "…"
    return ApiError(f"unknown field {path!r}{hint}", param=path, code="unknown_parameter")
