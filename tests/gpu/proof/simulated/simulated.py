"""Simulated acceptance, for a benchmark of random weights: an SGLang plugin that no installation has.

Every draft token is kept with chance CONFIDENCE, which the drafter also states as its confidence. Accepted lengths are
drawn from the uniforms of acceptance and limited to the verified tokens. The real kernels run, their results are
replaced. Answers are meaningless.
"""

from typing import Any

import torch

CONFIDENCE = 0.8


def register() -> None:
    """Register the hooks; SGLang calls it in every process that it starts."""
    from outrider.drafters.block.drafter import BlockDrafter
    from outrider.kernels.noise import Purpose, streams, uniforms
    from outrider.server.plugin.decode import sampling, verify_tail

    draw, in_graph, eager = BlockDrafter._draw, verify_tail.accept_logits, sampling.Sampling.accept

    def draw_certain(drafter: BlockDrafter, *given: Any) -> Any:
        tokens, probs, confidence = draw(drafter, *given)
        return tokens, probs, torch.full_like(confidence, CONFIDENCE)

    def accept_in_graph(batch: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        _, tokens = in_graph(batch, *given)
        return accepted(batch.tokens, batch.verify_lens, batch.uniforms, tokens)

    def accept(self: Any, logits: Any, draft: Any, verify_lens: Any, flat: Any) -> tuple[torch.Tensor, torch.Tensor]:
        _, tokens = eager(self, logits, draft, verify_lens, flat)
        anchors = flat.positions[flat.qo_indptr[:-1].long()]
        numbers = uniforms(streams(self.seeds, anchors, Purpose.ACCEPT), draft.tokens.shape[1])
        return accepted(draft.tokens, verify_lens, numbers, tokens)

    BlockDrafter._draw = draw_certain
    verify_tail.accept_logits = accept_in_graph
    sampling.Sampling.accept = accept


def accepted(
    drafts: torch.Tensor, verify_lens: torch.Tensor, numbers: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return accepted lengths [R], with the token after them, and tokens [R, gamma + 1].

    drafts, numbers: [R, gamma]; numbers are uniform. tokens: [R, gamma + 1], the target's tokens. Low token ids, which
        may end an answer, become 3.
    """
    kept = (numbers < CONFIDENCE).long().cumprod(1).sum(1).minimum(verify_lens)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    whole = torch.cat([drafts, drafts[:, :1]], 1)
    return kept + 1, torch.where(places < kept[:, None], whole, tokens[:, :1]).clamp(min=3)
