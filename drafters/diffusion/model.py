"""The diffusion drafter's network: a small language model over the tokens alone, which denoises a block.

Rows of a block: the anchor x_0, marked by the separator, then x_1 .. x_{gamma-1}, with masks for unknown tokens. Row n
predicts x_{n+1}, as in the target. Context rows see the context before them, block rows the context and the whole
block. No context row sees a block, so keys and values of the context stay valid.
"""

import torch
from torch import nn

from ..block.config import BlockConfig
from ..block.heads import ConfidenceHead
from ..block.layers import DraftLayer
from ..block.model import DraftModel


class DiffusionModel(DraftModel):
    """Backbone and confidence head; mask and separator are vectors [d] and no tokens of any vocabulary."""

    kinds = ("diffusion",)

    def __init__(self, config: BlockConfig, vocab: torch.Tensor | None = None) -> None:
        super().__init__(config, vocab)
        size = config.hidden_size
        self.mask = nn.Parameter(torch.zeros(size))
        self.separator = nn.Parameter(torch.zeros(size))
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None

    def block_inputs(self, embedded: torch.Tensor, revealed: torch.Tensor) -> torch.Tensor:
        """Return inputs [A, Q, d] of blocks from the embeddings [A, Q, d] of x_0 .. x_{Q-1}. revealed: [A, Q-1] bool;
        elsewhere the embedding is not read."""
        known = torch.where(revealed[..., None], embedded[:, 1:], self.mask)
        return torch.cat([embedded[:, :1] + self.separator, known], 1)
