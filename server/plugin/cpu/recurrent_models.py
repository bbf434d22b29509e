"""SGLang's gated delta models (Qwen3-Next, Qwen3.5) on a CPU: torch replaces operations that it has only in Triton."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from outrider.kernels.fused import rms_norm, silu_mul
from outrider.kernels.pointwise import sigmoid

from .. import must_take

CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"
WRAPPER = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"
"""Wraps SGLang's backend for such layers around one for attention; ours is both."""


def register() -> None:
    from sglang.srt.configs import qwen3_next
    from sglang.srt.configs.mamba_utils import Mamba2StateDType

    states = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
    must_take.replace(qwen3_next, "mamba2_state_dtype", lambda config=None: states)
    config = qwen3_next.Qwen3NextConfig
    must_take.replace(config, "__init__", _with_layers(config.__init__))
    must_take.replace(config, "layers_block_type", property(_layers))
    HookRegistry.register(WRAPPER, _as_it_is, HookType.AROUND)
    # SGLang's pool keeps a state for every draft token; ours are recomputed from the verified tokens.
    HookRegistry.register(f"{CONFIGURATOR}._pd_prefill_skips_mamba_spec_state", lambda: True, HookType.REPLACE)


def backend_of(runner: Any) -> Any:
    """Return the attention backend of a model that a runner of SGLang's has loaded."""
    if hybrid_gdn_config(runner.model_config) is None:
        from ..flat_attention import FlatAttentionBackend
        from .layer_shapes import fit

        fit(runner.token_to_kv_pool, runner.model)
        return FlatAttentionBackend(runner)
    from .recurrent import RecurrentBackend

    return RecurrentBackend(runner)


def _as_it_is(original: Callable[..., Any], runner: Any, backend: Any) -> Any:
    return backend if hybrid_gdn_config(runner.model_config) is not None else original(runner, backend)


def _with_layers(original: Callable[..., None]) -> Callable[..., None]:
    """Let SGLang's configuration read the fields that Transformers writes today: a list of layers instead of their
    interval, and one dictionary of rotary parameters."""

    def init(self: Any, *args: Any, layer_types: list[str] | None = None, **fields: Any) -> None:
        rope = fields.get("rope_parameters") or {}
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in rope:
                fields.setdefault(name, rope[name])
        original(self, *args, **fields)
        self.full_attention_interval = interval = fields.get("full_attention_interval", 4)
        self.layer_types = layer_types or [
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(self.num_hidden_layers)
        ]

    return init


def _layers(config: Any) -> list[str]:
    return ["attention" if kind == "full_attention" else kind for kind in config.layer_types]


def adapt(model_config: Any) -> None:
    """Change SGLang's classes for such a model, which it has imported to load it."""
    if hybrid_gdn_config(model_config) is None:
        return
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.kernels.ops.attention.fla.layernorm_gated import RMSNorm
    from sglang.srt.models import qwen3_5, qwen3_next

    must_take.replace(qwen3_next, "fused_qkvzba_split_reshape_cat", _split_by_heads)
    must_take.replace(qwen3_5, "fused_qkvzba_split_reshape_cat_contiguous", _split)
    must_take.replace(qwen3_5, "fused_sigmoid_mul", _gate)
    for norm in (FusedRMSNormGated, RMSNorm):
        must_take.replace(norm, "forward", _gated_norm)


def _split_by_heads(
    qkvz: torch.Tensor, ba: torch.Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split projections that have the parts of each key head together. Returns queries, keys and values of all heads
    side by side [B, C], then z [B, H, V], b and a [B, H]."""
    group = value_heads // key_heads
    parts = qkvz.view(len(qkvz), key_heads, -1).split([key_dim, key_dim, group * value_dim, group * value_dim], -1)
    q, k, v, z = (part.flatten(1) for part in parts)
    b, a = (part.flatten(1) for part in ba.view(len(ba), key_heads, -1).split(group, -1))
    return torch.cat([q, k, v], -1), z.view(len(z), value_heads, value_dim), b, a


def _split(
    qkvz: torch.Tensor, ba: torch.Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the same for projections that have each part of all heads together."""
    mixed, z = qkvz.split([2 * key_heads * key_dim + value_heads * value_dim, value_heads * value_dim], -1)
    b, a = ba.split(value_heads, -1)
    return mixed, z.unflatten(-1, (value_heads, value_dim)), b, a


def _gate(x: torch.Tensor, gate: torch.Tensor, inplace: bool = False, quant: bool = False) -> torch.Tensor:
    """Return x [B, H * D] times the sigmoid of gate [B, H, D]."""
    return x * sigmoid(gate.reshape(x.shape))


def _gated_norm(self: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Return the RMS norm of x [N, V] times silu(z [N, V])."""
    if self.activation == "sigmoid":
        raise ValueError("a model with sigmoid gates in its recurrent layers has not been compared with Transformers")
    return silu_mul(torch.cat([z, rms_norm(x, self.weight, self.eps)], -1))
