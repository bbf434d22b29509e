"""Gated delta layers (Qwen3-Next, Qwen3.5) beside full attention, and their states, which follow accepted tokens alone.

SGLang's pools hold the states: one slot of a request, for all layers. A prefill advances them by all of its tokens. A
verification leaves them, since any draft may be dropped; `RecurrentBackend.commit` then advances each request's by the
tokens that stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outrider.kernels import gated_delta
from outrider.kernels.gated_delta import Corrections

from ..flat_attention import FlatAttentionBackend


@dataclass(frozen=True, slots=True)
class Verified:
    """One layer's tokens of a verification: inputs [B, C] of the convolution, and what they correct."""

    inputs: torch.Tensor
    made: Corrections


class RecurrentBackend(FlatAttentionBackend):
    """Our attention for models some of whose layers are gated delta networks."""

    def __init__(self, runner: Any):
        super().__init__(runner)
        self.pool = runner.req_to_token_pool
        self.slots: torch.Tensor  # of the forward under way
        self.indptr: torch.Tensor  # of the same
        self.verified: dict[int, Verified] | None = None  # of the same, by layer; None: it is no verification

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        mode = forward_batch.forward_mode
        self.indptr = self.batch.qo_indptr.long()
        self.slots = self.pool.get_mamba_indices(self.batch.rows).long()
        self.verified = {} if mode.is_target_verify() else None

    def forward(self, *args: Any, mixed_qkv: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        if mixed_qkv is None:
            return super().forward(*args, **more)
        return self._gated_delta(more["layer"], mixed_qkv, more["a"], more["b"])

    def _gated_delta(self, layer: Any, inputs: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        state = self.pool.mamba2_layer_cache(layer.layer_id)
        windows, write = state.conv[0][self.slots], self.verified is None
        mixed = gated_delta.convolve(inputs, layer.conv_weights, windows, self.indptr)
        queries, keys, values = mixed.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
        outputs, made = gated_delta.gated_delta(
            queries.unflatten(-1, (layer.num_q_heads, -1)),
            keys.unflatten(-1, (layer.num_k_heads, -1)),
            values.unflatten(-1, (layer.num_v_heads, -1)),
            gated_delta.gates(a, b, layer.A_log, layer.dt_bias),
            state.temporal,
            self.slots,
            self.indptr,
            write=write,
        )
        if self.verified is None:
            state.conv[0][self.slots] = gated_delta.slide(windows, inputs, self.indptr, self.indptr.diff())
        else:
            self.verified[layer.layer_id] = Verified(inputs, made)
        return outputs.to(inputs.dtype)[None]

    def commit(self, accept_lens: torch.Tensor) -> None:
        """Advance the states of the batch that was just verified by the first accept_lens [R] tokens of each request:
        the anchor and the drafts accepted after it."""
        for layer, verified in (self.verified or {}).items():
            state = self.pool.mamba2_layer_cache(layer)
            windows = state.conv[0][self.slots]
            state.conv[0][self.slots] = gated_delta.slide(windows, verified.inputs, self.indptr, accept_lens)
            gated_delta.replay(state.temporal, self.slots, verified.made, self.indptr, accept_lens)
        self.verified = None
