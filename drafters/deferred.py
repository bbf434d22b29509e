"""A drafter model that takes in what was committed when it next drafts.

Observing a token reads the model's weights, whether one comes or many: while nobody drafts, which is most steps of a
busy server, it would cost percents of a step for nothing. What is drafted stays the same to the bit.
"""

from __future__ import annotations

import torch

from .base import Draft, DraftBatch, Drafter, Features

ROWS = 128
"""Tokens that wait at most; so many at a time are as cheap each as any more."""


class DeferredObserve(Drafter):
    """Keeps what `observe` shows until `propose`, the only reader of the draft state, or until ROWS tokens wait."""

    def __init__(self, model: Drafter):
        self.model = model
        self.gamma = model.gamma
        self.target_layers = model.target_layers
        self.shortens = model.shortens
        self.waiting = 0
        self.hidden = torch.empty(0)  # [ROWS, m*d], the features of `waiting` tokens; made by the first
        self.tokens, self.positions, self.slots = torch.zeros((3, ROWS), dtype=torch.int64)

    def allocate(self, slots: int) -> None:
        self.model.allocate(slots)

    def observe(self, features: Features) -> None:
        if features.hidden is None:
            raise ValueError(f"a drafter model needs the outputs of target layers {list(self.target_layers)}")
        count = len(features.slots)
        if self.waiting + count > ROWS:
            self.flush()
        if count > ROWS:
            self.model.observe(features)
            return
        if self.hidden.shape[1:] != features.hidden.shape[1:] or self.hidden.dtype != features.hidden.dtype:
            self.flush()
            self.hidden = features.hidden.new_empty(ROWS, features.hidden.shape[1])
        place = slice(self.waiting, self.waiting + count)
        self.hidden[place] = features.hidden
        self.tokens[place], self.positions[place] = features.tokens, features.positions
        self.slots[place] = features.slots
        self.waiting += count

    def propose(self, batch: DraftBatch) -> Draft:
        self.flush()
        return self.model.propose(batch)

    def flush(self) -> None:
        """Show the model what waits. A slot that was freed and given to another token keeps the latter's state."""
        if not self.waiting:
            return
        slots = self.slots[: self.waiting]
        kept: slice | torch.Tensor = slice(self.waiting)
        if len(set(slots.tolist())) < self.waiting:
            latest = {slot: index for index, slot in enumerate(slots.tolist())}
            kept = torch.tensor(list(latest.values()))
        self.model.observe(Features(self.hidden[kept], self.tokens[kept], self.positions[kept], self.slots[kept]))
        self.waiting = 0
