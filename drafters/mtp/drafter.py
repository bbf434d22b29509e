"""A target's MTP layer as a `Drafter`, chained over its own output. Its features are the target's last hidden states,
after the final norm."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import torch

from outrider.kernels.fused import add_rms_norm
from outrider.kernels.weights import multiply

from ..base import Target
from ..chain.drafter import ChainDrafter
from ..chain.network import ATTENTION, LAYER, ChainNetwork, ChainWeights, stacked
from ..spans import Spans
from .checkpoint import GATE, check_target, load
from .experts import Experts, Mlp


class MtpNetwork(ChainNetwork):
    """A layer ready to compute; arguments as in `ChainNetwork`."""

    def __init__(self, weights: ChainWeights, head: torch.Tensor, positions: int):
        config = weights.config
        super().__init__(weights, head, positions, replace(config, head_dim=config.rotary_dim))
        tensors = weights.tensors
        self.embedding_norm, self.hidden_norm = tensors["embedding_norm.weight"], tensors["hidden_norm.weight"]
        self.input_norm = tensors[f"{LAYER}input_layernorm.weight"]
        self.gated = config.gated
        kv = [f"{ATTENTION}{part}_proj" for part in "kv"]
        self.qkv = stacked(weights, [f"{ATTENTION}q_proj", *kv, *([GATE] if config.gated else [])])
        self.kv = stacked(weights, kv)
        self.mlp = Mlp(weights) if config.experts is None else Experts(weights, config.experts)

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._normed(hidden.to(self.dtype).contiguous(), self.hidden_norm)

    def write(self, embedded: torch.Tensor, features: torch.Tensor, rows: Spans) -> None:
        self._write(multiply(self._normed(self._joined(embedded, features), self.input_norm), self.kv), rows)

    def step(self, embedded: torch.Tensor, features: torch.Tensor, rows: Spans) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        residual = self._joined(embedded, features)
        projected = multiply(self._normed(residual, self.input_norm), self.qkv)
        if self.gated:
            width = config.num_heads * config.head_dim
            qkv, gate = projected.split([projected.shape[1] - width, width], 1)
            attended = self._attend(qkv, rows) * torch.sigmoid(gate)
        else:
            attended = self._attend(projected, rows)
        x = add_rms_norm(multiply(attended, self.out), residual, self.mlp_norm, config.rms_norm_eps)
        normed = add_rms_norm(self.mlp(x), residual, self.norm, config.rms_norm_eps)
        return multiply(normed, self.head), self.fuse(normed)

    def _joined(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return multiply(torch.cat([self._normed(embedded, self.embedding_norm), features], -1), self.fc)


class MtpDrafter(ChainDrafter):
    """Drafts from the target's last hidden states, which the engine exposes for every target."""

    reads_output = True
    network_type = MtpNetwork

    @classmethod
    def load(cls, target: Target, checkpoint: str | Path, *, gamma: int) -> Self:
        """Load the layer of a target's folder; raises CheckpointError where it does not fit."""
        embedding, head = target.weights()
        read = partial(load, dtype=target.dtype, device=embedding.device)
        weights = read(checkpoint)
        size, vocab = embedding.shape[1], embedding.shape[0]
        layers = target.config.num_hidden_layers
        check_target(weights.config, {"hidden_size": size, "vocab_size": vocab, "num_hidden_layers": layers})
        return cls(weights, read=read, embedding=embedding, head=head, gamma=gamma)
