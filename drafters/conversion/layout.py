"""The layout of a block-diffusion model's rows, as its `config.json` states it.

A text is cut at multiples of the block size, prompt included. Blocks before the open one are finished. The open block
has masks for unknown tokens; its rows see each other in both directions and all finished rows.

With `shift`, row i predicts token i + 1, as in the target, and finished rows are causal. So a text without masks is
read as the target reads it (nearest to an autoregressive start; Fast-dLLM v2 shifts too). The last finished row
predicts the first token of a block. Without `shift`, row i predicts token i, and a finished block's rows see their
whole block (SDAR).
"""

from dataclasses import dataclass

import torch

LAYOUTS = ("shift", "sdar")


@dataclass(frozen=True, slots=True)
class Layout:
    """block_size: tokens of a block. mask_token_id: token in the place of unknown ones; it is never predicted."""

    block_size: int
    mask_token_id: int
    shift: bool

    @property
    def name(self) -> str:
        """One of LAYOUTS."""
        return "shift" if self.shift else "sdar"

    @property
    def context_mask(self) -> str:
        """Context of finished rows: `causal`, or `block` (their whole block too)."""
        return "causal" if self.shift else "block"

    def seen(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return [Q, K] bool: whether the finished row at each of positions `queries` [Q] sees that at each of `keys`
        [K]."""
        if self.shift:
            return keys <= queries[:, None]
        return keys // self.block_size <= queries[:, None] // self.block_size
