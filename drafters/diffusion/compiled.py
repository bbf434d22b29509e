"""A pass of the diffusion drafter in one call of the compiled kernels; `DiffusionModel` is its plain version. Weights
are kept as in `block/compiled.py`. q is the distribution of the rounded model."""

from typing import Any

import torch

from outrider.kernels.cpu import native

from ..block.compiled import Pools, cos_sin, native_arguments, prepare
from ..spans import Spans
from .model import DiffusionModel


class CompiledDiffusion:
    """The parts of a model that the call needs.

    head: [V', d], the target's rows that the model drafts from.
    weights: of each layer (q|k|v, out, gate|up, down), then the head.
    norms: of each layer (before attention, of queries, of keys, before the MLP; empty: none), then the last.
    """

    def __init__(self, model: DiffusionModel, head: torch.Tensor) -> None:
        self.model, layers, none = model, model.draft_layers, head.new_empty(0)
        products = [w.weight for layer in layers for w in (layer.qkv, layer.o_proj, layer.gate_up, layer.down_proj)]
        self.weights = [prepare(weight) for weight in (*products, head)]
        norms = [n for x in layers for n in (x.input_layernorm, x.q_norm, x.k_norm, x.post_attention_layernorm)]
        self.norms = [getattr(norm, "weight", none) for norm in (*norms, model.norm)]
        self._native: Any = None

    def allocate(self, pools: Pools) -> None:
        """Work on these pools [S, Hkv, D] of every layer from now on."""
        table = cos_sin(self.model.rotary.table.float()).contiguous()
        self._native = torch.classes.outrider.DiffusionDrafter(
            *native_arguments(self.weights), self.norms, *zip(*pools, strict=True), table, self.model.norm.weight[None],
            self.model.config.rms_norm_eps,
        )  # fmt: skip

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, context: Spans | None,
        block: Spans | None, columns: slice,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return states [R * M, d] and logits [R * M, V'] of the M `columns` of each block. x: [N, d] inputs of the
        context's rows, then of the block's, at positions and slots [N]."""
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
    """Prepare a model once; None where compiled kernels are missing or do not support its shape."""
    config = model.config
    even = config.hidden_size % 16 == 0 and config.intermediate_size % 16 == 0 and config.head_dim % 32 == 0
    return CompiledDiffusion(model, head) if even and native.fits(model.norm.weight, head) else None
