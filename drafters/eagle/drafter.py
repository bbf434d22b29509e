"""EAGLE-3 as a `Drafter`; its features are fused outputs of several layers of the target."""

from functools import partial
from pathlib import Path
from typing import Self

from ..base import Target
from ..chain.drafter import ChainDrafter
from .checkpoint import check_target, load
from .compiled import CompiledChain, compile_chain
from .network import EagleNetwork


class EagleDrafter(ChainDrafter):
    """Drafts from outputs of several layers of the target."""

    network_type = EagleNetwork

    @classmethod
    def load(cls, target: Target, checkpoint: str | Path, *, gamma: int) -> Self:
        """Load a checkpoint folder for a target; raises CheckpointError where it does not fit."""
        embedding, head = target.weights()
        config = target.config
        read = partial(load, target_layers=config.num_hidden_layers, dtype=target.dtype, device=embedding.device)
        weights = read(checkpoint)
        check_target(weights.config, weights.tensors, *embedding.shape)
        positions = int(getattr(config, "max_position_embeddings", 0) or 0)
        return cls(weights, read=read, embedding=embedding, head=head, gamma=gamma, positions=positions)

    def _compile(self) -> CompiledChain | None:
        assert isinstance(self.network, EagleNetwork)
        return compile_chain(self.network, self.embedding, self.vocab)
