"""A planted fault of block verification."""

from collections.abc import Callable

import torch

from outrider.kernels.acceptance import Verification

Kept = Callable[[Verification], tuple[torch.Tensor, torch.Tensor]]
"""Drafts kept [R] and the scale after them [R], as `acceptance.kept_drafts` returns them."""


def every_test_by_the_scale(honest: Kept, batch: Verification) -> tuple[torch.Tensor, torch.Tensor]:
    """Test every token by the scale, which only the last token of a block should use."""
    number, scale = torch.zeros_like(batch.verify_lens), torch.ones(len(batch.tokens))
    for k in range(1, batch.tokens.shape[1] + 1):
        of_k = honest(batch._replace(verify_lens=batch.verify_lens.clamp(max=k)))
        last = (of_k[0] == k) & (batch.verify_lens >= k)
        number, scale = torch.where(last, k, number), torch.where(last, of_k[1], scale)
    return number, scale
