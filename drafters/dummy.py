"""Drafts of a fixed length that the target hardly ever accepts, for measuring steps of an exact shape."""

import torch

from .base import Draft, DraftBatch, Drafter


class FixedDrafter(Drafter):
    """Drafts `gamma` tokens spread over the vocabulary, hashes of anchor and position."""

    def __init__(self, gamma: int, vocabulary: int):
        self.gamma, self.vocabulary = gamma, vocabulary

    def propose(self, batch: DraftBatch) -> Draft:
        positions = batch.seq_lens[:, None] + torch.arange(self.gamma, device=batch.anchors.device)
        tokens = (batch.anchors[:, None] * 7919 + positions * 104729) % self.vocabulary
        return Draft(
            tokens=tokens,
            lens=torch.full_like(batch.anchors, self.gamma),
            confidence=torch.zeros(tokens.shape, device=tokens.device),
        )
