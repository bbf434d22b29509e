"""Simulated acceptance, for a benchmark of random weights: an SGLang plugin that no installation has.

Every draft token is kept with chance CONFIDENCE, which is also the confidence that the drafter states. Lengths are drawn
from the numbers that acceptance draws from, and clamped to what was verified. The kernels of both run as always; what
they say is replaced. Answers mean nothing.
"""

from __future__ import annotations

from typing import Any

import torch

CONFIDENCE = 0.8


def register() -> None:
    """SGLang calls it in every process that it starts."""
    from outrider.drafters.block.drafter import BlockDrafter
    from outrider.server.plugin.decode import verify_tail

    draw, accept = BlockDrafter._draw, verify_tail.accept_logits

    def draw_certain(drafter: BlockDrafter, *given: Any) -> Any:
        tokens, probs, confidence = draw(drafter, *given)
        return tokens, probs, torch.full_like(confidence, CONFIDENCE) + 0 * confidence

    def accept_drawn(batch: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        _, said = accept(batch, *given)
        kept = (batch.uniforms < CONFIDENCE).long().cumprod(1).sum(1).minimum(batch.verify_lens)
        drafts = torch.cat([batch.tokens, batch.tokens[:, :1]], 1)
        places = torch.arange(said.shape[1], device=said.device)
        tokens = torch.where(places < kept[:, None], drafts, said[:, :1].clamp(min=3))
        return (kept + 1).to(said.dtype), tokens

    BlockDrafter._draw = draw_certain  # type: ignore[method-assign]
    verify_tail.accept_logits = accept_drawn  # type: ignore[assignment]
