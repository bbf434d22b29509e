"""The network of an EAGLE-3 head: one decoder layer over pairs of a token's embedding and a feature.

A row pairs token t_j with the fused features of position j - 1, and its output predicts t_{j+1}. Behind the text's last
token there are no features; what the layer made of the row before stands for them. With one layer, the key and value of
a row depend on that row alone.

On a CPU with compiled kernels a bfloat16 head's weights are kept in 8 bits, as `block/compiled.py` keeps them. Its q is
what the rounded head says.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider.kernels.attention import flat_attention
from outrider.kernels.cpu import native
from outrider.kernels.flat_batch import FlatBatch
from outrider.kernels.fused import add_rms_norm, rms_norm, rope_write, silu_mul
from outrider.kernels.int8 import multiply
from outrider.kernels.linear import pack

from ..block.compiled import Prepared, prepare
from ..block.layers import frequencies
from ..spans import Spans
from .checkpoint import ATTENTION, LAYER, EagleWeights


class EagleNetwork:
    """A head ready to compute.

    head: [V', d]. positions: longest text that it is told apart by position; later ones all have the last one's.
    """

    def __init__(self, weights: EagleWeights, head: torch.Tensor, positions: int):
        self.config, tensors = weights.config, weights.tensors
        fc = tensors["fc.weight"]
        self.dtype, self.device = fc.dtype, fc.device
        self.input_norm = weights.get("input_norm.weight")
        self.fc_norms = [
            tensors[f"fc_norm.{i}.weight"] for i in range(len(weights.layers)) if "fc_norm.0.weight" in tensors
        ]
        self.fc = _prepared(fc, weights.get("fc.bias"))
        self.hidden_norm, self.embedding_norm, self.mlp_norm = (
            tensors[f"{LAYER}{name}.weight"] for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        )
        self.qkv, self.kv = (
            _stacked(weights, [f"{ATTENTION}{part}_proj" for part in parts]) for parts in ("qkv", "kv")
        )
        self.q_norm, self.k_norm = (weights.get(f"{ATTENTION}{part}_norm.weight") for part in "qk")
        self.out = _stacked(weights, [f"{ATTENTION}o_proj"])
        self.gate_up = _stacked(weights, [f"{LAYER}mlp.{part}_proj" for part in ("gate", "up")])
        self.down = _stacked(weights, [f"{LAYER}mlp.down_proj"])
        self.norm, self.head = tensors["norm.weight"], _prepared(head.to(self.dtype))
        inverse, scale = frequencies(self.config)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
        self.cos_sin = (torch.cat([angles.cos(), angles.sin()], -1) * scale).to(self.device)
        self.keys = self.values = fc.new_empty(0)

    def allocate(self, slots: int) -> None:
        """Make room for keys and values [slots, Hkv, D]."""
        shape = slots, self.config.num_kv_heads, self.config.head_dim
        self.keys, self.values = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in "kv")

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features [N, d] of the target's hidden states [N, m*d_target]."""
        x = hidden.to(self.dtype).contiguous()
        if self.input_norm is not None:
            x = self._normed(x, self.input_norm)
        if self.fc_norms:
            chunks = x.chunk(len(self.fc_norms), -1)
            x = torch.cat([self._normed(c.contiguous(), w) for c, w in zip(chunks, self.fc_norms, strict=True)], -1)
        return multiply(x, self.fc)

    def write(self, embedded: torch.Tensor, features: torch.Tensor, rows: Spans) -> None:
        """Put the keys and values of rows at their slots: embeddings and features [N, d]."""
        kv = multiply(torch.cat(self._inputs(embedded, features), -1), self.kv)
        k, v = kv.unflatten(-1, (2, self.config.num_kv_heads, -1)).unbind(1)
        self._rotate_and_write(k[:, :0], k, v, rows)

    def step(self, embedded: torch.Tensor, features: torch.Tensor, rows: Spans) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [R, V'] of what follows the last row of each text, and what stands for its features [R, d].

        embedded, features: [R, d], as of `write`, which has written all rows before.
        """
        config = self.config
        inputs = self._inputs(embedded, features)
        residual = inputs[1] if config.norm_before_residual else features.clone()
        qkv = multiply(torch.cat(inputs, -1), self.qkv).unflatten(-1, (-1, config.head_dim))
        q, k, v = qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], 1)
        q = self._rotate_and_write(q, k, v, rows)
        attended = flat_attention(q, self.keys, self.values, behind_first(rows.batch), scale=config.head_dim**-0.5)
        x = add_rms_norm(multiply(attended.flatten(1), self.out), residual, self.mlp_norm, config.rms_norm_eps)
        x = multiply(silu_mul(multiply(x, self.gate_up)), self.down)
        normed = add_rms_norm(x, residual, self.norm, config.rms_norm_eps)
        return multiply(normed, self.head), normed if config.norm_output else residual

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps)

    def _inputs(self, embedded: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._normed(embedded, self.embedding_norm), self._normed(features, self.hidden_norm)

    def _rotate_and_write(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Spans) -> torch.Tensor:
        """Queries [N, Hq, D] normed and rotated; keys, which are too, and values [N, Hkv, D] go to their slots."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normed(q.contiguous(), self.q_norm), self._normed(k.contiguous(), self.k_norm)
        positions = (rows.positions - 1).clamp(0, len(self.cos_sin) - 1)  # the first row is that of the second token
        rope_write(q, k, v, positions, self.cos_sin, self.keys, self.values, rows.slots)
        return q


def behind_first(batch: FlatBatch) -> FlatBatch:
    """The batch without the first position of each text, which has no row."""
    return replace(batch, kv_lens=batch.kv_lens - 1, page_table=batch.page_table[:, 1:])


def _prepared(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Prepared:
    return prepare(weight, bias) if native.fits(weight) else pack(weight, bias)


def _stacked(weights: EagleWeights, names: list[str]) -> Prepared:
    """Projections of these names as one product; those without a bias beside others that have one get zeros."""
    parts = [weights.tensors[f"{name}.weight"] for name in names]
    biases = [weights.get(f"{name}.bias") for name in names]
    bias = None
    if any(each is not None for each in biases):
        filled = [part.new_zeros(len(part)) if each is None else each for part, each in zip(parts, biases, strict=True)]
        bias = torch.cat(filled)
    return _prepared(torch.cat(parts), bias)
