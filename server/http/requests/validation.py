"""Check a well-formed request before it reaches the scheduler. Changes no field."""

from collections.abc import Callable
from dataclasses import dataclass

from ...plugin.options import OwnDrafter
from ..errors import ApiError, invalid_value, unsupported
from ..keys.key_file import Key
from .bounds import out_of_range
from .images import Images
from .json_body import clipped
from .protocol import ChatRequest, TextRequest
from .tokenization import PromptLength

RESERVED_FOR_TEMPLATE = frozenset(
    [
        *("conversation", "messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "processor_kwargs"),
    ]
)
"""Arguments of transformers' `apply_chat_template`, and variables that it gives to the template."""

UNORDERED = "a block-diffusion model draws tokens before the tokens to their left are known"
LOGPROBS = "the tokens of a block-diffusion model have no probability given the tokens before them"
PARSED = "an answer in its form cannot be enforced: " + UNORDERED
NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "frequency_penalty": ((0,), UNORDERED),
    "presence_penalty": ((0,), UNORDERED),
    "repetition_penalty": ((1,), UNORDERED),
    "min_tokens": ((0,), UNORDERED),
    "logit_bias": ((), "block diffusion applies no bias to its distributions"),
    "regex": ((), PARSED),
    "ebnf": ((), PARSED),
    "json_schema": ((), PARSED),
    "logprobs": ((False,), LOGPROBS),
    "tools": ((), PARSED),
}
"""Fields that block diffusion cannot serve: their neutral values, and the reason."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the running server.

    model: its name in requests.
    context_length: tokens of prompt and answer together.
    max_body_bytes: of a request's body.
    diffusion: the model fills blocks of tokens, see `NEUTRAL`.
    prompt_length: refuses texts that are longer than the context; None leaves that to the tokenizer.
    learns: the server keeps answers for the drafter to learn from, unless a request or key refuses.
    looks_across: lookup searches the texts of the key's earlier requests.
    adapters: names of served LoRA adapters.
    role: see `PluginConfig`.
    images: checks images; None: the model reads none.
    drafter_of: finds the drafter by key and model, with one for each key or adapter; None: all share one.
    """

    max_body_bytes: int
    model: str
    vocab_size: int
    context_length: int
    max_choices: int
    has_tool_parser: bool
    diffusion: bool = False
    prompt_length: PromptLength | None = None
    learns: bool = False
    looks_across: bool = False
    adapters: Callable[[], tuple[str, ...]] = tuple
    role: str = ""
    images: Images | None = None
    drafter_of: Callable[[Key | None, str], OwnDrafter] | None = None


def check(request: ChatRequest | TextRequest, limits: Limits) -> None:
    """Raise ApiError for the first field that cannot be served."""
    check_model(request.model, limits)
    if limits.diffusion:
        _check_diffusion(request)
    if isinstance(request, ChatRequest):
        _check_chat(request, limits)
    else:
        _check_text(request, limits)
    _check_max_tokens(request, limits)
    if request.cache_salt is not None and not isinstance(request.cache_salt, str):
        raise ApiError("'cache_salt' has to be a string", param="cache_salt", code="invalid_type")


def check_model(name: str, limits: Limits) -> None:
    """Raise ApiError if neither the model nor an adapter has this name."""
    served = (limits.model, *limits.adapters())
    if name not in served:
        shown = " or ".join(map(repr, served))
        raise ApiError(
            f"model {clipped(name)} is not served here; {shown} is", status=404, param="model", code="model_not_found"
        )


def _check_chat(request: ChatRequest, limits: Limits) -> None:
    if request.top_logprobs and not request.logprobs:
        raise invalid_value("top_logprobs", "'top_logprobs' needs logprobs=true")
    if request.add_generation_prompt is not None and request.add_generation_prompt is request.continue_final_message:
        raise invalid_value(
            "add_generation_prompt",
            "an answer begins a message ('add_generation_prompt') or continues the last ('continue_final_message'): "
            "one is true, the other false",
        )
    last = request.messages[-1]
    if request.continue_final_message and (last.role != "assistant" or last.tool_calls):
        text = "'continue_final_message' needs a last message of 'assistant' without tool calls"
        raise invalid_value("continue_final_message", text)
    for name in request.chat_template_kwargs or ():
        if name in RESERVED_FOR_TEMPLATE:
            raise invalid_value(
                "chat_template_kwargs", f"'chat_template_kwargs' may not hold {name!r}, which the server sets"
            )
    wants_tools = request.tools or any(getattr(message, "tools", None) for message in request.messages)
    if wants_tools and request.tool_choice != "none" and not limits.has_tool_parser:
        raise unsupported(
            "tools", "no tool-call parser is known for this model; start the server with --tool-call-parser"
        )


def _check_text(request: TextRequest, limits: Limits) -> None:
    prompts = prompt_count(request)
    if (choices := request.n * prompts) > limits.max_choices:
        raise invalid_value(
            "prompt",
            f"{prompts} prompts with n={request.n} make {choices} choices; this server allows {limits.max_choices}",
        )
    if request.best_of is not None and request.best_of != request.n:
        raise unsupported("best_of", "this server does not support 'best_of': ask for n and choose")


def prompt_count(request: ChatRequest | TextRequest) -> int:
    """Return the number of prompts of a request that was checked."""
    prompt = request.prompt if isinstance(request, TextRequest) else ""
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1


def _check_max_tokens(request: ChatRequest | TextRequest, limits: Limits) -> None:
    # SGLang, which counts the prompt, checks prompt and answer together.
    if isinstance(request, TextRequest) and request.max_tokens == 0 and (request.stream or not request.echo):
        raise out_of_range("max_tokens", "a number from 1 on", 0)
    longest = getattr(request, "max_completion_tokens", None) or request.max_tokens
    if longest is not None and request.min_tokens > longest:
        raise out_of_range("min_tokens", f"a number from 0 to {longest}, the most tokens asked for", request.min_tokens)


def _check_diffusion(request: ChatRequest | TextRequest) -> None:
    """Raise ApiError for the first field that block diffusion cannot serve."""
    for name, (neutral, reason) in NEUTRAL.items():
        value = getattr(request, name, None)
        if value is not None and value not in neutral:
            raise _unsupported(name, reason)
    if request.response_format is not None and request.response_format.type != "text":
        raise _unsupported("response_format", PARSED)
    if any(getattr(message, "tools", None) for message in getattr(request, "messages", ())):
        raise _unsupported("tools", PARSED)
    if request.speculation is not None and request.speculation.trace:
        raise _unsupported("speculation.trace", "no token has a drafter")


def _unsupported(name: str, reason: str) -> ApiError:
    return unsupported(name, f"this model does not support {name!r}: {reason}")
