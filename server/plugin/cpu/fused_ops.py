"""Replaces SGLang's plain torch operations by our CPU kernels, through its own dispatch, for any model it loads."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from outrider.kernels import fused
from outrider.kernels.linear import pack
from outrider.kernels.pointwise import sigmoid
from outrider.kernels.weights import Weight, multiply, pack_int8

from .. import must_take
from ..config import PluginConfig
from . import experts, fused_model, group_weights, stable_torch

DISPATCH_KEY = "outrider"
"""Our platform's name in SGLang's operator dispatch."""
HEADS = (
    "ParallelLMHead", "VocabParallelEmbedding", "ScaledEmbedding", "Gemma3TextScaledWordEmbedding",
    "Gemma3nTextScaledWordEmbedding",
)  # fmt: skip
"""Classes of heads that are plain matrices."""
GATED = "sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul"
"""Triton's launch for experts that all tokens share (Qwen2 MoE)."""
Prepare = Callable[[torch.Tensor], Weight]


def register() -> None:
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers import logits_processor
    from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    ours = {RMSNorm: _rms_norm, SiluAndMul: _silu_and_mul, GeluAndMul: _gelu_and_mul, RotaryEmbedding: _rope}
    for op, forward in ours.items():
        BaseFusedOp.register_oot_forward(op, forward, DISPATCH_KEY)
    # That dispatch has no matrix products.
    prepare: Prepare = pack_int8 if PluginConfig.from_env().quantization == "int8" else pack
    must_take.replace(UnquantizedLinearMethod, "process_weights_after_loading", _layer_packing(prepare))
    must_take.replace(UnquantizedLinearMethod, "apply", apply_linear)
    processor = logits_processor.LogitsProcessor
    head = _lm_head_with_fallback(processor._compute_lm_head, prepare)
    must_take.replace(processor, "_compute_lm_head", head)
    must_take.replace(logits_processor, "_is_cpu", True)  # caps logits in torch; else in Triton
    HookRegistry.register(GATED, _add_gated, HookType.REPLACE)
    for each in (stable_torch, experts, fused_model, group_weights):
        each.register()


def _layer_packing(prepare: Prepare) -> Callable[[Any, Any], None]:
    def pack_layer(self: Any, layer: Any) -> None:
        """Lay out a linear layer's weight for our kernel, once it is loaded, and free the original. Weights that are no
        matrix stay, such as a short convolution's."""
        if layer.weight.dim() != 2:
            return
        layer.packed = prepare(layer.weight.data)
        if getattr(layer.packed, "plain", None) is None:
            layer.weight.data = layer.weight.data.new_empty(0)

    return pack_layer


def apply_linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [..., depth] times the weight prepared for a linear layer, plus the bias."""
    out = multiply(x, layer.packed)
    return out if bias is None else out.add_(bias)


def _lm_head_with_fallback(original: Callable[..., torch.Tensor], prepare: Prepare) -> Callable[..., torch.Tensor]:
    """Compute the head by our kernel where it is a plain matrix; its weight stays, since it may be the embedding's too.
    It adds a bias that the head itself has (Phi, GPT-J), which SGLang leaves out."""

    def compute_lm_head(
        self: Any, hidden: torch.Tensor, lm_head: Any, bias: Any = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        plain = type(lm_head).__name__ in HEADS and not self.use_fp32_lm_head
        packed: Weight | None = getattr(lm_head, "packed", None)
        if not plain or bias is not None or (packed is None and lm_head.weight.dtype != hidden.dtype):
            return original(self, hidden, lm_head, bias, out=out)
        if packed is None:
            packed = lm_head.packed = prepare(lm_head.weight.data)
        logits = multiply(hidden, packed)
        head_bias = getattr(lm_head, "bias", None)
        return logits if head_bias is None else logits.add_(head_bias)

    return compute_lm_head


def _add_gated(
    hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, out: torch.Tensor, *, do_add: bool
) -> None:
    """Write shared [N, H] into out [N, H], or add it, times the sigmoid of hidden [N, H] by gate [H]."""
    gated = sigmoid((hidden.float() * gate.float()).sum(-1, keepdim=True)) * shared.float()
    out.copy_(gated + out.float() if do_add else gated)


def _rms_norm(
    self: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    special = self.variance_size_override is not None or self.cast_x_before_out_mul or self.fp32_residual
    if special or post_residual_addition is not None or x.dtype != self.weight.dtype:
        return self.forward_native(x, residual, post_residual_addition)
    if residual is None:
        return fused.rms_norm(x, self.weight, self.variance_epsilon)
    return fused.add_rms_norm(x, residual, self.weight, self.variance_epsilon), residual


def _silu_and_mul(self: Any, x: torch.Tensor) -> torch.Tensor:
    return fused.silu_mul(x)


def _gelu_and_mul(self: Any, x: torch.Tensor) -> torch.Tensor:
    return fused.gelu_mul(x) if self.approximate == "tanh" else self.forward_native(x)


def _rope(
    self: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not self.is_neox_style or offsets is not None or positions.ndim != 1 or fused_set_kv_buffer_arg is not None:
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    tokens = positions.shape[0]
    fused.rope(
        query.view(tokens, -1, self.head_size), key.view(tokens, -1, self.head_size), positions, self.cos_sin_cache
    )
    return query, key
