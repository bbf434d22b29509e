"""The block drafter's network: DFlash's backbone, and DSpark's heads on top of it.

Embedding and language-model head are the target's, frozen, and never part of this module.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .candidates import CodebookSelector, LatticeSelector
from .choosing import CodebookChoosing, LatticeChoosing
from .config import READING_KINDS, BlockConfig
from .gemma import GemmaLayer
from .heads import SEQUENTIAL_HEADS, ConfidenceHead, MarkovHead
from .layers import DraftLayer, Rotary

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps (layer number, q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, D]) of block inputs to the attention output [N, Hq, D]
over the block's own keys and its request's context."""
Attended = Callable[[int, DraftLayer, torch.Tensor], torch.Tensor]
"""Maps (layer number, layer, input [N, d]) to the same."""


class TrainedModel(nn.Module):
    """A network that a training run can train.

    config: has kind, gamma, vocab_size and to_json.
    vocab: [V'] int64, the target's token of each logit column; strictly increasing.
    """

    config: Any
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None
    vocab: torch.Tensor


class DraftModel(TrainedModel):
    """The common part of the networks of block and diffusion drafters."""

    kinds: tuple[str, ...]
    config: BlockConfig
    layers: nn.ModuleList
    norm: nn.RMSNorm
    rotary: Rotary

    def __init__(self, config: BlockConfig, vocab: torch.Tensor | None = None) -> None:
        super().__init__()
        self.config, self.rotary = config, Rotary(config)
        self.markov_head = self.confidence_head = None
        ids = torch.arange(config.logit_size) if vocab is None else vocab.long()
        self.register_buffer("vocab", ids, persistent=False)

    @property
    def draft_layers(self) -> list[DraftLayer]:
        """`layers` with their type."""
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def forward(self, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend, rows: int = 0) -> torch.Tensor:
        """Return normed hidden states [N, d] of inputs [N, d] at positions [N], in blocks of `rows` rows."""
        rope = self.rotary.rows(positions)
        return self.through(embedded, lambda i, layer, x: attend(i, *layer.block_qkv(x, rope, rows)), rows)

    def through(self, x: torch.Tensor, attended: Attended, rows: int = 0) -> torch.Tensor:
        """Return the same, for a caller that also projects and rotates."""
        for i, layer in enumerate(self.draft_layers):
            x = layer.finish(x, attended(i, layer, x), rows)
        return self.norm(x)


class BlockModel(DraftModel):
    """Backbone and heads."""

    kinds = READING_KINDS

    def __init__(self, config: BlockConfig, vocab: torch.Tensor | None = None) -> None:
        super().__init__(config, vocab)
        size = config.hidden_size
        self.fc = nn.Linear(len(config.target_layers) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, config.rms_norm_eps)
        layer = GemmaLayer if config.gemma else DraftLayer
        self.layers = nn.ModuleList(layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.markov_head = SEQUENTIAL_HEADS[config.markov_head](config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None
        choosing = config.choosing
        self.candidate_selector = CodebookSelector(config) if isinstance(choosing, CodebookChoosing) else None
        self.lilicorr = LatticeSelector(config) if isinstance(choosing, LatticeChoosing) else None

    @property
    def selector(self) -> CodebookSelector | LatticeSelector | None:
        """The head that draws paths, if there is one."""
        return self.lilicorr if self.candidate_selector is None else self.candidate_selector

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """Return target features [N, m*d] in the drafter's width, [N, d] (equation 2)."""
        return self.hidden_norm(self.fc(features))

    def context_kv(self, features: torch.Tensor, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values [N, Hkv, D] per layer of target features [N, m*d] at positions [N] (equations 2,
        3)."""
        return self.keys_values(self.context(features), positions)

    def keys_values(self, context: torch.Tensor, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values [N, Hkv, D] per layer of `context` [N, d] at positions [N] (equation 3)."""
        rope = self.rotary.rows(positions)
        return [layer.context_kv(context, rope) for layer in self.draft_layers]
