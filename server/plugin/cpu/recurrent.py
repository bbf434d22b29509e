"""Gated delta layers (Qwen3-Next, Qwen3.5) together with full attention, and their states, advanced only by accepted
tokens.

SGLang's pools hold the states: one slot of a request, for all layers. A prefill advances them by all of its tokens. A
verification leaves them unchanged, since any draft may be dropped; `RecurrentBackend.commit` then advances each
request's by the tokens that stay.
"""

from dataclasses import dataclass
from typing import Any

import torch

from outrider.kernels import gated_delta
from outrider.kernels.gated_delta import Corrections, DeltaLayer, States

from ..flat_attention import FlatAttentionBackend


@dataclass(frozen=True, slots=True)
class Verified:
    """One layer's tokens of a verification: inputs [B, C] of the convolution, corrections of the states."""

    inputs: torch.Tensor
    made: Corrections
    states: States


class RecurrentBackend(FlatAttentionBackend):
    """Our attention for models in which some layers are gated delta networks."""

    def __init__(self, runner: Any):
        super().__init__(runner)
        self.pool = runner.req_to_token_pool
        self.layers: dict[int, DeltaLayer] = {}
        self.slots: torch.Tensor  # of the forward under way
        self.indptr: torch.Tensor  # of the same
        self.verified: list[Verified] | None = None  # of the same, by layer; None: it is no verification

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        mode = forward_batch.forward_mode
        self.indptr = self.batch.qo_indptr.long()
        self.slots = self.pool.get_mamba_indices(self.batch.rows).long()
        self.verified = [] if mode.is_target_verify() else None

    def forward(self, *args: Any, mixed_qkv: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        if mixed_qkv is None:
            return super().forward(*args, **more)
        return self._gated_delta(more["layer"], mixed_qkv, more["a"], more["b"])

    def _gated_delta(self, layer: Any, inputs: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        constant, states = self._layer(layer), self._states(layer.layer_id)
        mixed = gated_delta.convolve(inputs, constant, states)
        outputs, made = gated_delta.gated_delta(mixed, a, b, constant, states, write=self.verified is None)
        if self.verified is None:
            gated_delta.slide(inputs, states, self.indptr.diff())
        else:
            self.verified.append(Verified(inputs, made, states))
        return outputs[None]

    def _layer(self, layer: Any) -> DeltaLayer:
        known = self.layers.get(layer.layer_id)
        if known is None:
            weights = layer.conv_weights, layer.A_log, layer.dt_bias
            known = self.layers[layer.layer_id] = DeltaLayer.from_checkpoint(*weights, layer.num_k_heads)
        return known

    def _states(self, number: int) -> States:
        """Return the states of a layer in SGLang's memory, in our kernels' order. Only whole slots are read or copied
        elsewhere, so the order inside them is free."""
        state = self.pool.mamba2_layer_cache(number)
        slots, channels, length = state.conv[0].shape
        windows = state.conv[0].as_strided((slots, length, channels), (length * channels, channels, 1))
        _, heads, value_dim, key_dim = state.temporal.shape
        pool = state.temporal.view(slots, heads, key_dim, value_dim)
        return States(windows, pool, self.slots, self.indptr)

    def commit(self, accept_lens: torch.Tensor) -> None:
        """Advance the states of the batch just verified by the first accept_lens [R] tokens of each request. These are
        the anchor and the drafts accepted after it."""
        for verified in self.verified or ():
            gated_delta.slide(verified.inputs, verified.states, accept_lens)
            gated_delta.replay(verified.made, verified.states, accept_lens)
        self.verified = None
