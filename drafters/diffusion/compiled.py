"""A pass of the diffusion drafter in one call of the compiled kernels, beside the plain one (`DiffusionModel`).

Weights are kept as `block/compiled.py` keeps them. Its q is what the rounded model says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.kernels.cpu import native

from ..block.compiled import Prepared, packed_arguments, prepare
from ..spans import Spans
from .model import DiffusionModel

Pools = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class CompiledDiffusion:
    """The parts of a model that the call needs.

    weights: of each layer (q|k|v, out, gate|up, down), the head.
    norms: of each layer (before attention, of queries, of keys, before the MLP), the last; no numbers: there is none.
    """

    like: torch.Tensor
    cos_sin: torch.Tensor
    weights: list[Prepared]
    norms: list[torch.Tensor]
    eps: float
    _native: Any = field(init=False, default=None)

    def allocate(self, pools: Pools) -> None:
        """Work on these pools [S, Hkv, D] of every layer from now on."""
        packed, kinds, scales = zip(*map(packed_arguments, self.weights), strict=True)
        self._native = torch.classes.outrider.DiffusionDrafter(
            packed, kinds, scales, [w.outputs for w in self.weights], [w.depth for w in self.weights], self.norms,
            *zip(*pools, strict=True), self.cos_sin, self.like, self.eps,
        )  # fmt: skip

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, context: Spans | None,
        block: Spans | None, columns: slice,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """States [R * M, d] and logits [R * M, V'] of the M `columns` of each block; x: [N, d] inputs of the context's
        rows, then of the block's, at positions and slots [N]."""
        page_table = (context or block).batch.page_table  # type: ignore[union-attr]
        return self._native.forward(
            x, positions, slots, page_table, *_arrays(context), *_arrays(block), columns.start,
            columns.stop - columns.start,
        )  # fmt: skip


def _arrays(spans: Spans | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if spans is None:
        nothing = torch.empty(0, dtype=torch.int32)
        return nothing.long(), nothing, nothing
    return spans.batch.rows, spans.batch.qo_indptr, spans.batch.kv_lens


def compile_diffusion(model: DiffusionModel, head: torch.Tensor) -> CompiledDiffusion | None:
    """Prepare a model once; None where the compiled kernels are missing or do not know its shape.

    head: [V', d], the target's rows that the model drafts from.
    """
    config, norm = model.config, model.norm.weight
    even = config.hidden_size % 16 == 0 and config.intermediate_size % 16 == 0 and config.head_dim % 32 == 0
    if not (even and native.fits(norm, head)):
        return None
    layers, none = model.draft_layers, norm.new_empty(0)
    products = [w.weight for layer in layers for w in (layer.qkv, layer.o_proj, layer.gate_up, layer.down_proj)]
    norms = []
    for layer in layers:
        own = (layer.q_norm.weight, layer.k_norm.weight) if config.qk_norm else (none, none)
        norms += [layer.input_layernorm.weight, *own, layer.post_attention_layernorm.weight]
    half, table = config.head_dim // 2, model.rotary.table.float()
    return CompiledDiffusion(
        like=norm[None],
        cos_sin=torch.cat([table[:, :half], table[:, -half:]], 1).contiguous(),
        weights=[prepare(weight) for weight in (*products, head)],
        norms=[*norms, norm],
        eps=config.rms_norm_eps,
    )
