"""Memory that a server will take, known before it loads."""

import math
from dataclasses import dataclass
from typing import Any

from outrider.kernels.cpu import native

from ..errors import UserError
from ..machine import hardware
from ..model import recurrent, target
from ..model.target import Model
from .declared import SMALLEST_KV
from .settings import Settings

# Python with torch and SGLang loaded, in three processes, and activations of a prefill chunk.
PROCESS_BYTES = int(1.8 * 2**30)
# Of each further rank of an engine.
RANK_BYTES = int(0.7 * 2**30)
# Default limit of a CPU server's KV cache, unless one request of the whole context needs more.
DEFAULT_KV_BYTES = 2 * 2**30
# Default room of the cache: requests in flight (unless --max-running-requests is given), tokens of each, and further
# tokens for prefixes that later requests share.
REQUESTS, REQUEST_TOKENS, PREFIX_TOKENS = 32, 1024, 8192
# States that a request of a recurrent model may hold: its own, its prompt's for later requests, and one that it copies.
STATES_OF_REQUEST = 3
# Share of free memory that a KV cache of default size may take.
MAX_KV_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """max_total_tokens: size of each engine's KV cache in tokens; None leaves it to SGLang, which measures on a GPU.
    reason: the size, its MB and the cause, in words; "" if unknown. states: recurrent states that each engine keeps for
    requests and prefixes; None for a model without such layers."""

    max_total_tokens: int | None
    reason: str = ""
    states: int | None = None


def kv_bytes_per_token(config: dict[str, Any], float_size: int) -> int:
    """Return the bytes that one token takes in the KV cache of all layers together."""
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 0) - recurrent.recurrent_layers(config)
    if rank := config.get("kv_lora_rank"):  # multi-head latent attention keeps one compressed vector
        return layers * (int(rank) + int(config.get("qk_rope_head_dim") or 0)) * float_size
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    hidden = int(config.get("hidden_size") or config.get("n_embd") or 0)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_size = int(config.get("head_dim") or hidden // heads)
    return 2 * layers * kv_heads * head_size * float_size


def plan(settings: Settings, model: Model) -> MemoryPlan:
    """Size the KV cache, or raise UserError when the model does not fit."""
    if settings.resolved_device == "cuda":
        # With flags of SGLang's own the weights may be split over GPUs or quantised: then SGLang knows better.
        if not settings.sglang_flags and (weights := target.weight_bytes(model, None)) > (
            free := hardware.gpu_memory()
        ):
            raise UserError(f"too little GPU memory for {model.name}: weights {_gib(weights)}, {_gib(free)} are free")
        return MemoryPlan(settings.max_total_tokens)
    float_size = 4 if settings.resolved_dtype == "float32" else 2
    free = hardware.available_memory() // settings.resolved_engines
    parallel = settings.parallel  # each node has its part of weights and cache
    in_blocks = settings.quantization == "none" and native.available() and parallel.tp_size == 1
    weights = target.weight_bytes(model, float_size, in_blocks) // parallel.nnodes
    per_token = kv_bytes_per_token(model.config, float_size) // parallel.nnodes
    processes = PROCESS_BYTES + RANK_BYTES * (parallel.ranks_here - 1)
    each = recurrent.state_bytes(model.config)
    kept = (settings.max_running_requests or REQUESTS) * (1 if settings.disable_radix_cache else STATES_OF_REQUEST)
    states = each * (kept + 1)  # one is SGLang's padding
    room = free - weights - states - processes
    if settings.max_total_tokens is not None:
        tokens, why = settings.max_total_tokens, "--max-total-tokens"
    elif per_token == 0:
        return MemoryPlan(None)
    else:
        wanted, why = _wanted(settings, settings.context_length or model.context_length, per_token)
        tokens = min(wanted, int(max(0, room * MAX_KV_SHARE) // per_token))
        why = why if tokens == wanted else "half of the free memory"
    if tokens < SMALLEST_KV or tokens * per_token > room:
        tokens = max(tokens, SMALLEST_KV)
        raise UserError(
            f"too little memory for {model.name}: weights {_gib(weights)}, KV cache of {tokens} tokens "
            f"{_gib(tokens * per_token)}, {f'states {_gib(states)}, ' if states else ''}processes {_gib(processes)}; "
            f"{_gib(free)} are free"
            + ("; lower --max-total-tokens" if settings.max_total_tokens else "")
            + ("; lower --max-running-requests" if states else "")
        )
    reason = f"KV cache of {tokens} tokens, {tokens * per_token / 1e6:.0f} MB when full ({why})"
    return MemoryPlan(tokens, reason, kept if each else None)


def _wanted(settings: Settings, context: int, per_token: int) -> tuple[int, str]:
    """Return the tokens of a cache that memory does not limit, at least one whole context, and the reason."""
    each, requests = min(context, REQUEST_TOKENS), settings.max_running_requests or REQUESTS
    many = min(requests * each + PREFIX_TOKENS, DEFAULT_KV_BYTES // per_token)
    if many > context:
        return many, f"{requests} requests of {each} tokens and {PREFIX_TOKENS} of shared prefixes, 2 GiB at most"
    return context, "one request of the whole context"


def _gib(size: float) -> str:
    return f"{math.ceil(size / 2**30 * 10) / 10:.1f} GiB"
