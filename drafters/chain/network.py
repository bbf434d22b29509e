"""The network of a drafter that chains: one decoder layer over pairs of a token's embedding and a feature.

A row pairs token t_j with the features of position j - 1, and its output predicts t_{j+1}. After the text's last token
there are no features; the layer's output for the row before takes their place. With one layer, the key and value of a
row depend on that row alone.

On a CPU with compiled kernels the weights of a bfloat16 drafter are kept in 8 bits, as in `block/compiled.py`. q is the
distribution of the rounded drafter.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.kernels.attention import flat_attention
from outrider.kernels.cpu import native
from outrider.kernels.fused import rms_norm, rope_write
from outrider.kernels.linear import PackedWeight, pack

from ..block.compiled import prepare
from ..block.layers import frequencies
from ..checkpoint import Shape
from ..config_file import LayerShape
from ..spans import Spans

LAYER = "layers.0."
ATTENTION = f"{LAYER}self_attn."


@dataclass(frozen=True, slots=True)
class ChainWeights:
    """A drafter's tensors by name, in one dtype, on one device.

    config: its shape. layers: target layers that it reads; (): the target's last hidden states.
    vocab: [V'] int64, the target's token of each column of its logits, strictly increasing; None: all tokens.
    """

    config: Any
    tensors: dict[str, torch.Tensor]
    layers: tuple[int, ...] = ()
    vocab: torch.Tensor | None = None

    def get(self, name: str) -> torch.Tensor | None:
        return self.tensors.get(name)


class ChainNetwork(ABC):
    """A layer ready to compute. head: [V', d]. positions: length of the rotary table; later positions use its last row.
    rotated: shape of the rotary embedding."""

    def __init__(self, weights: ChainWeights, head: torch.Tensor, positions: int, rotated: LayerShape):
        self.config, tensors = weights.config, weights.tensors
        fc = tensors["fc.weight"]
        self.dtype, self.device = fc.dtype, fc.device
        self.fc = prepared(fc, weights.get("fc.bias"))
        self.mlp_norm, self.norm = tensors[f"{LAYER}post_attention_layernorm.weight"], tensors["norm.weight"]
        self.q_norm, self.k_norm = (weights.get(f"{ATTENTION}{part}_norm.weight") for part in "qk")
        self.out = stacked(weights, [f"{ATTENTION}o_proj"])
        self.head = prepared(head.to(self.dtype))
        inverse, scale = frequencies(rotated)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
        self.cos_sin = (torch.cat([angles.cos(), angles.sin()], -1) * scale).to(self.device)
        self.keys = self.values = fc.new_empty(0)

    def allocate(self, slots: int) -> None:
        """Allocate keys and values [slots, Hkv, D]."""
        shape = slots, self.config.num_kv_heads, self.config.head_dim
        self.keys, self.values = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in "kv")

    @abstractmethod
    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return features [N, d] of the target's hidden states."""

    @abstractmethod
    def write(self, embedded: torch.Tensor, features: torch.Tensor, rows: Spans) -> None:
        """Store the keys and values of rows, from embeddings and features [N, d], at their slots."""

    @abstractmethod
    def step(self, embedded: torch.Tensor, features: torch.Tensor, rows: Spans) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [R, V'] of the token after each text's last row, and the features [R, d] of the next row.
        embedded, features: [R, d], as in `write`, which has written all rows before."""

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps)

    def _write(self, kv: torch.Tensor, rows: Spans) -> None:
        """Store keys and values, side by side [N, 2 * Hkv * D], at their slots."""
        k, v = kv.unflatten(-1, (2, self.config.num_kv_heads, -1)).unbind(1)
        self._rotate_and_write(k[:, :0], k, v, rows)

    def _attend(self, qkv: torch.Tensor, rows: Spans) -> torch.Tensor:
        """Return the attention output [R, Hq * D] of queries, keys and values side by side [R, (Hq + 2 * Hkv) * D]."""
        config = self.config
        heads = qkv.unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], 1)
        q = self._rotate_and_write(q, k, v, rows)
        lens, table = rows.batch.kv_lens - 1, rows.batch.page_table[:, 1:]  # a text's first position has no row
        batch = replace(rows.batch, kv_lens=lens, page_table=table)
        return flat_attention(q, self.keys, self.values, batch, scale=config.head_dim**-0.5).flatten(1)

    def _rotate_and_write(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Spans) -> torch.Tensor:
        """Norm and rotate queries [N, Hq, D] and keys; store keys and values [N, Hkv, D] at their slots; return the
        queries."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normed(q.contiguous(), self.q_norm), self._normed(k.contiguous(), self.k_norm)
        positions = (rows.positions - 1).clamp(0, len(self.cos_sin) - 1)  # the first row is that of the second token
        rope_write(q, k, v, positions, self.cos_sin, self.keys, self.values, rows.slots)
        return q


def prepared(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
    return prepare(weight, bias) if native.fits(weight) else pack(weight, bias)


def stacked(weights: ChainWeights, names: list[str]) -> PackedWeight:
    """Stack the projections of these names into one product; where only some have a bias, the rest get zeros."""
    parts = [weights.tensors[f"{name}.weight"] for name in names]
    biases = [weights.get(f"{name}.bias") for name in names]
    bias = None
    if any(each is not None for each in biases):
        filled = [part.new_zeros(len(part)) if each is None else each for part, each in zip(parts, biases, strict=True)]
        bias = torch.cat(filled)
    return prepared(torch.cat(parts), bias)


def layer_shapes(config: Any, inputs: int, *, gated: bool = False) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return shapes of a layer's tensors without its MLP: required ones, and optional ones (biases, norms of q and k).
    inputs: numbers in a row that its attention reads. gated: the projection of queries also has gates."""
    size, width = config.hidden_size, config.head_dim
    rows = {"q": (1 + gated) * config.num_heads * width} | dict.fromkeys("kv", config.num_kv_heads * width)
    needed: dict[str, Shape] = {
        **{f"{LAYER}{norm}_layernorm.weight": (size,) for norm in ("input", "post_attention")},
        **{f"{ATTENTION}{part}_proj.weight": (count, inputs) for part, count in rows.items()},
        f"{ATTENTION}o_proj.weight": (size, config.num_heads * width),
    }
    optional: dict[str, Shape] = {
        **{f"{ATTENTION}{part}_proj.bias": (count,) for part, count in rows.items()},
        f"{ATTENTION}o_proj.bias": (size,),
        **{f"{ATTENTION}{part}_norm.weight": (width,) for part in "qk"},
    }
    return needed, optional


def mlp_shapes(prefix: str, size: int, inner: int) -> dict[str, Shape]:
    """Return shapes of an MLP's tensors with this prefix."""
    rows = {f"{prefix}{part}_proj.weight": (inner, size) for part in ("gate", "up")}
    return {**rows, f"{prefix}down_proj.weight": (size, inner)}
