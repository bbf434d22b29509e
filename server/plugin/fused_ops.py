"""Swaps our CPU kernels in for SGLang's plain torch operations, through its own dispatch, for any model it loads."""

from __future__ import annotations

from typing import Any

import torch

from outrider.kernels import fused
from outrider.kernels.linear import linear

DISPATCH_KEY = "outrider"
"""Our platform's name in SGLang's operator dispatch."""


def register() -> None:
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    for op, forward in ((RMSNorm, _rms_norm), (SiluAndMul, _silu_and_mul), (RotaryEmbedding, _rope)):
        BaseFusedOp.register_oot_forward(op, forward, DISPATCH_KEY)
    # Matrix products are no operator of that dispatch.
    UnquantizedLinearMethod.apply = _linear
    head = LogitsProcessor._compute_lm_head

    def compute_lm_head(self: Any, hidden: torch.Tensor, lm_head: Any, bias: Any = None) -> torch.Tensor:
        plain = type(lm_head).__name__ in ("ParallelLMHead", "VocabParallelEmbedding") and not self.use_fp32_lm_head
        if plain and bias is None and lm_head.weight.dtype == hidden.dtype:
            return linear(hidden, lm_head.weight)
        return head(self, hidden, lm_head, bias)

    LogitsProcessor._compute_lm_head = compute_lm_head


def _linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return linear(x, layer.weight, bias)


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
        query.view(tokens, -1, self.head_size),
        key.view(tokens, -1, self.head_size),
        positions,
        self.cos_sin_cache,
    )
    return query, key
