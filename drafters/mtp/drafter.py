"""A target's MTP layer behind the drafter contract, chained over its own output."""

from __future__ import annotations

from pathlib import Path

import torch

from ..base import Target
from ..chain import ChainDrafter
from ..chain.network import ChainWeights
from .checkpoint import check_target, load
from .network import MtpNetwork


class MtpDrafter(ChainDrafter):
    """Drafts from the target's last hidden states, which the engine shows of every target."""

    reads_output = True

    @classmethod
    def load(cls, target: Target, checkpoint: str | Path, *, gamma: int) -> MtpDrafter:
        """Load the layer of a target's folder; raises CheckpointError when it does not fit."""
        embedding, head = target.weights()
        weights = load(checkpoint, dtype=target.dtype, device=embedding.device)
        size, vocab = embedding.shape[1], embedding.shape[0]
        layers = target.config.num_hidden_layers
        check_target(weights.config, {"hidden_size": size, "vocab_size": vocab, "num_hidden_layers": layers})
        return cls(weights, embedding=embedding, head=head, gamma=gamma)

    def _read(self, checkpoint: str) -> ChainWeights:
        return load(checkpoint, dtype=self.dtype, device=self.device)

    def _network(self, weights: ChainWeights, head: torch.Tensor) -> MtpNetwork:
        return MtpNetwork(weights, head, self._positions)
