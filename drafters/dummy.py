"""A drafter that repeats the anchor gamma times, for measuring steps of an exact shape."""

from __future__ import annotations

import torch

from .base import Draft, DraftBatch, Drafter, Features


class FixedDrafter(Drafter):
    def __init__(self, gamma: int):
        self.gamma = gamma

    def allocate(self, slots: int) -> None:
        pass

    def observe(self, features: Features) -> None:
        pass

    def propose(self, batch: DraftBatch) -> Draft:
        shape = (len(batch.anchors), self.gamma)
        return Draft(
            tokens=batch.anchors[:, None].expand(shape).contiguous(),
            lens=torch.full_like(batch.anchors, self.gamma),
            confidence=torch.zeros(shape, device=batch.anchors.device),
        )
