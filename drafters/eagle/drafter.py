"""EAGLE-3 behind the drafter contract; its features are fused outputs of several layers of the target."""

from __future__ import annotations

from pathlib import Path

import torch

from ..base import Rows, Target
from ..chain.drafter import ChainDrafter
from ..chain.network import ChainWeights
from .checkpoint import check_target, load
from .compiled import CompiledChain, compile_chain
from .network import EagleNetwork


class EagleDrafter(ChainDrafter):
    """layers: of the target, for folders that do not say which of them they read. Others as of `ChainDrafter`."""

    def __init__(
        self, weights: ChainWeights, *, embedding: Rows, head: Rows, gamma: int, positions: int = 0, layers: int = 0
    ) -> None:
        self._layers = layers
        super().__init__(weights, embedding=embedding, head=head, gamma=gamma, positions=positions)

    @classmethod
    def load(cls, target: Target, checkpoint: str | Path, *, gamma: int) -> EagleDrafter:
        """Load a checkpoint folder for a target; raises CheckpointError when it does not fit."""
        embedding, head = target.weights()
        config = target.config
        weights = load(checkpoint, config.num_hidden_layers, dtype=target.dtype, device=embedding.device)
        check_target(weights.config, weights.tensors, *embedding.shape)
        positions = int(getattr(config, "max_position_embeddings", 0) or 0)
        return cls(
            weights, embedding=embedding, head=head, gamma=gamma, positions=positions, layers=config.num_hidden_layers
        )

    def _read(self, checkpoint: str) -> ChainWeights:
        return load(checkpoint, self._layers, dtype=self.dtype, device=self.device)

    def _network(self, weights: ChainWeights, head: torch.Tensor) -> EagleNetwork:
        return EagleNetwork(weights, head, self._positions)

    def _compile(self) -> CompiledChain | None:
        assert isinstance(self.network, EagleNetwork)
        return compile_chain(self.network, self.embedding, self.vocab)
