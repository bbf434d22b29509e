"""A whole layer of a Llama-like decoder (pre-norm attention and SiLU-gated MLP without biases) in one call.

At one token the arithmetic of a layer takes a few hundred microseconds, and Python between its ten operations adds a
third to that. The compiled call runs the same operations in the same order, so its bits are theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from . import fused
from .attention import flat_attention
from .blocks import BlockWeight
from .flat_batch import FlatBatch
from .int8 import Int8Weight, multiply
from .linear import PackedWeight


@dataclass(frozen=True)
class DecoderLayer:
    """The constant part of a layer, the same in all steps.

    weights: four: queries|keys|values, attention's output, gate|up, down; without biases. All int8 or none; panels and
    blocks, of any kinds, may be mixed.
    norms: two [H], before attention and before the MLP. eps: theirs.
    scale, window, logit_cap: as of `flat_attention`.
    """

    weights: Sequence[PackedWeight | Int8Weight | BlockWeight]
    norms: Sequence[torch.Tensor]
    eps: float
    scale: float
    window: int = -1
    logit_cap: float = 0.0
    _prepared: tuple[list[torch.Tensor], list[int], list[torch.Tensor], list[int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.weights) != 4 or len(self.norms) != 2:
            raise ValueError(f"a layer has 4 weights and 2 norms, got {len(self.weights)} and {len(self.norms)}")
        if any(weight.bias is not None for weight in self.weights):
            raise ValueError("a layer with biases is not supported: use the single operations")
        outputs = [weight.outputs for weight in self.weights]
        kinds = [weight.kind if isinstance(weight, BlockWeight) else -1 for weight in self.weights]
        codes = [weight for weight in self.weights if isinstance(weight, Int8Weight)]
        packed = [_packed(weight) for weight in self.weights if not isinstance(weight, Int8Weight)]
        present = [x for x in packed if x is not None]
        if len(codes) == 4:
            prepared = [w.codes for w in codes], kinds, [w.scales for w in codes], outputs
        elif len(present) == 4:
            prepared = present, kinds, [], outputs
        else:
            raise ValueError("the four weights must be prepared alike, by the compiled kernels")
        object.__setattr__(self, "_prepared", prepared)


def _packed(weight: PackedWeight | BlockWeight) -> torch.Tensor | None:
    return weight.blocks if isinstance(weight, BlockWeight) else weight.panels


def decoder_layer(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    layer: DecoderLayer,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    batch: FlatBatch,
    causal: bool = True,
) -> torch.Tensor:
    """Run N tokens through the layer: [N, H], to be added to `residual`, which is changed in place.

    x: [N, H], what the layer before returned; None for the first layer.
    residual: [N, H], the sum so far. positions: [N] int64. cos_sin: as of `fused.rope`.
    k_pool, v_pool: this layer's cache [S, Hkv, D]; slots: [N] int64, where the tokens' keys and values go.
    batch: which tokens belong to which request. causal: as of `flat_attention`.
    """
    weights, kinds, scales, outputs = layer._prepared
    return torch.ops.outrider.decoder_layer(
        x, residual, positions, cos_sin, k_pool, v_pool, slots,
        batch.qo_indptr, batch.kv_lens, batch.rows, batch.page_table,
        weights, kinds, scales, layer.norms, outputs, layer.eps, layer.scale, causal, layer.window, layer.logit_cap,
    )  # fmt: skip


def reference_decoder_layer(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    layer: DecoderLayer,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    batch: FlatBatch,
    causal: bool = True,
) -> torch.Tensor:
    """Reference of `decoder_layer`: the same bits, one operation after the other."""
    qkv_weight, out_weight, up_weight, down_weight = layer.weights
    before, between = layer.norms
    if x is None:
        normed = fused.rms_norm(residual, before, layer.eps)
    else:
        normed = fused.add_rms_norm(x, residual, before, layer.eps)
    heads, width = k_pool.shape[1:]
    qkv = multiply(normed, qkv_weight).view(len(residual), -1, width)
    q, k, v = qkv.split([qkv.shape[1] - 2 * heads, heads, heads], dim=1)
    fused.rope_write(q, k, v, positions, cos_sin, k_pool, v_pool, slots)
    attended = flat_attention(
        q, k_pool, v_pool, batch, scale=layer.scale, causal=causal, window=layer.window, logit_cap=layer.logit_cap
    )
    x = multiply(attended.flatten(1), out_weight)
    normed = fused.add_rms_norm(x, residual, between, layer.eps)
    return multiply(fused.silu_mul(multiply(normed, up_weight)), down_weight)
