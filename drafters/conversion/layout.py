"""The layout of a block-diffusion model's rows, as its `config.json` states it.

A text is cut at multiples of the block size, prompt included. Blocks before the open one are finished; the open one has
masks where tokens are not known yet, and its rows see each other in both directions and all finished rows.

`shift`: row i predicts token i + 1, as in the target, and finished rows are causal, so that a mask-free text is read
as the target reads it (nearest to an autoregressive start; Fast-dLLM v2 shifts too). The first token of a block is
predicted by the last finished row. Without it row i predicts token i, and a finished block's rows see the whole block
(SDAR).
"""

from dataclasses import dataclass

import torch

LAYOUTS = ("shift", "sdar")


@dataclass(frozen=True, slots=True)
class Layout:
    """block_size: tokens of a block; mask_token_id: the token that stands for one not known, and is never predicted."""

    block_size: int
    mask_token_id: int
    shift: bool

    @property
    def name(self) -> str:
        """One of LAYOUTS."""
        return "shift" if self.shift else "sdar"

    @property
    def context_mask(self) -> str:
        """Context of finished rows: `causal`, or `block` (the whole of their own block too)."""
        return "causal" if self.shift else "block"

    def seen(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """[Q, K] bool, which finished rows at positions `keys` [K] those at `queries` [Q] see."""
        if self.shift:
            return keys <= queries[:, None]
        return keys // self.block_size <= queries[:, None] // self.block_size
