"""The diffusion drafter's layers as a server runs them: new context and block as the rows of one flattened batch.

All products are shared; attention is one causal call for the context's rows and one for the blocks', which see their
whole block. Every operation is one of `kernels/`: compiled where that is possible, and no row's result depends on the
others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels import fused
from outrider.kernels.attention import flat_attention
from outrider.kernels.blocks import BlockWeight
from outrider.kernels.cpu import native
from outrider.kernels.flat_batch import FlatBatch
from outrider.kernels.int8 import multiply
from outrider.kernels.linear import PackedWeight, pack

from ..block.compiled import in_blocks
from .model import DiffusionModel

Pools = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Spans:
    """Neighbouring positions of requests, flattened to N rows.

    positions, slots: [N] int64. batch: which rows belong to which request.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    batch: FlatBatch

    @classmethod
    def of(cls, page_table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor) -> Spans:
        """Positions start .. start + count of each request, of which no count is 0: starts, counts [R] int64."""
        ends = counts.cumsum(0)
        each = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        positions = torch.arange(len(each), device=counts.device) + (starts - ends + counts)[each]
        indptr = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
        batch = FlatBatch(indptr, (starts + counts).to(torch.int32), rows, page_table)
        return cls(positions, page_table[rows[each], positions].long(), batch)


def prepare(weight: torch.Tensor) -> BlockWeight | PackedWeight:
    """A weight [outputs, depth] for `multiply`: in 8 bits where compiled kernels multiply bfloat16, else as it is."""
    return in_blocks(weight) if native.fits(weight) else pack(weight)


class PreparedLayers:
    """What does not change from step to step, and the caches [S, Hkv, D] of every layer, which `allocate` makes."""

    def __init__(self, model: DiffusionModel) -> None:
        self.config, self.layers, self.norm = model.config, model.draft_layers, model.norm.weight
        self.weights = [
            tuple(prepare(w.weight) for w in (layer.qkv, layer.o_proj, layer.gate_up, layer.down_proj))
            for layer in self.layers
        ]
        half, table = self.config.head_dim // 2, model.rotary.table.float()
        self.cos_sin = torch.cat([table[:, :half], table[:, -half:]], 1).contiguous()
        self.pools: Pools = []

    def allocate(self, slots: int) -> None:
        config, like = self.config, self.norm
        shape = slots, config.num_kv_heads, config.head_dim
        self.pools = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in self.layers]

    def forward(self, x: torch.Tensor, context: Spans | None, block: Spans | None) -> torch.Tensor:
        """Normed states [B, d] of the block's rows; x: [N, d] inputs of the context's rows, then of the block's.

        Keys and values of both go to their slots.
        """
        spans = [span for span in (context, block) if span is not None]
        positions = torch.cat([span.positions for span in spans]).clamp_(max=len(self.cos_sin) - 1)
        slots = torch.cat([span.slots for span in spans])
        behind = 0 if context is None else len(context.slots)
        eps, residual, out = self.config.rms_norm_eps, x.clone(), None
        for number, (layer, weights) in enumerate(zip(self.layers, self.weights, strict=True)):
            before = layer.input_layernorm.weight
            if out is None:
                normed = fused.rms_norm(residual, before, eps)
            else:
                normed = fused.add_rms_norm(out, residual, before, eps)
            q = self._write(number, multiply(normed, weights[0]), positions, slots)
            if number == len(self.layers) - 1:  # of the context only its keys and values are wanted
                context, q, residual = None, q[behind:], residual[behind:]
                if block is None:
                    return residual
            attended = self._attend(number, q, context, block)
            normed = fused.add_rms_norm(
                multiply(attended.flatten(1), weights[1]), residual, layer.post_attention_layernorm.weight, eps
            )
            out = multiply(fused.silu_mul(multiply(normed, weights[2])), weights[3])
        assert out is not None
        return fused.add_rms_norm(out, residual, self.norm, eps)

    def _write(self, number: int, qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Queries [N, Hq, D] of a layer, whose keys and values go to the cache."""
        config, layer = self.config, self.layers[number]
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q, k, v = qkv.view(len(qkv), -1, config.head_dim).split(heads, 1)
        if config.qk_norm:
            q = fused.rms_norm(q.contiguous(), layer.q_norm.weight, config.rms_norm_eps)
            k = fused.rms_norm(k.contiguous(), layer.k_norm.weight, config.rms_norm_eps)
        fused.rope_write(q, k, v, positions, self.cos_sin, *self.pools[number], slots)
        return q

    def _attend(self, number: int, q: torch.Tensor, context: Spans | None, block: Spans | None) -> torch.Tensor:
        scale, out, at = self.config.head_dim**-0.5, [], 0
        for span, causal in ((context, True), (block, False)):
            if span is not None:
                rows = q[at : at + len(span.slots)]
                out.append(flat_attention(rows, *self.pools[number], span.batch, scale=scale, causal=causal))
                at += len(span.slots)
        return out[0] if len(out) == 1 else torch.cat(out)
