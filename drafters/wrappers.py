"""Drafters around a drafter model: one that buffers what it observes, one that waits until an answer has begun."""

from __future__ import annotations

from dataclasses import replace

import torch

from .base import Draft, DraftBatch, Drafter, Features, Prefilled

ROWS = 128
"""Tokens that wait at most; larger batches are not cheaper per token."""


class Wrapper(Drafter):
    """A drafter around `model`."""

    def __init__(self, model: Drafter):
        self.model = model
        self.gamma, self.target_layers, self.shortens = model.gamma, model.target_layers, model.shortens
        self.assesses_itself, self.reads_output = model.assesses_itself, model.reads_output

    def allocate(self, slots: int) -> None:
        self.model.allocate(slots)

    def slot_state(self) -> list[torch.Tensor]:
        return self.model.slot_state()

    def observe(self, features: Features) -> None:
        self.model.observe(features)

    def prefilled(self, chunks: Prefilled) -> None:
        self.model.prefilled(chunks)

    def reload(self, checkpoint: str, number: int = 0) -> None:
        self.model.reload(checkpoint, number)

    def drop(self, number: int) -> None:
        self.model.drop(number)


class DeferredObserve(Wrapper):
    """Buffers observed tokens until `propose`, the only reader of the draft state, or until ROWS tokens wait.

    Observing one token costs as much as observing many, since both read the model's weights; in most steps of a busy
    server nothing is drafted. What is drafted stays the same to the bit.
    """

    def __init__(self, model: Drafter):
        super().__init__(model)
        self.waiting = 0
        self.hidden = torch.empty(0)  # [ROWS, m*d], the features of `waiting` tokens; made by the first
        self.tokens, self.positions, self.slots, self.sets = torch.zeros((4, ROWS), dtype=torch.int64)

    def observe(self, features: Features) -> None:
        if features.hidden is None:
            raise ValueError("a drafter model needs the target's hidden states")
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
        self.sets[place] = 0 if features.sets is None else features.sets
        self.waiting += count

    def propose(self, batch: DraftBatch) -> Draft:
        self.flush()
        return self.model.propose(batch)

    def reload(self, checkpoint: str, number: int = 0) -> None:
        self.flush()
        super().reload(checkpoint, number)

    def drop(self, number: int) -> None:
        self.flush()
        super().drop(number)

    def flush(self) -> None:
        """Show the model what waits. A slot that was freed and given to another token keeps the latter's state."""
        if not self.waiting:
            return
        slots = self.slots[: self.waiting]
        kept: slice | torch.Tensor = slice(self.waiting)
        if len(set(slots.tolist())) < self.waiting:
            latest = {slot: index for index, slot in enumerate(slots.tolist())}
            kept = torch.tensor(list(latest.values()))
        numbers = (each[kept] for each in (self.tokens, self.positions, self.slots, self.sets))
        self.model.observe(Features(self.hidden[kept], *numbers))
        self.waiting = 0


class Initialised(Wrapper):
    """`model`, which drafts for answers of at least `tokens` tokens (sequence initialisation: SpecDiff, section 4).

    Shorter ones are left to prompt lookup beside it, or go without drafts: an answer's beginning is decided by the
    prompt's last words, which a drafter trained on running text knows least of. Who drafts follows from the length of
    the text alone, so that it can favour no outcome of a draw.
    """

    def __init__(self, model: Drafter, tokens: int):
        super().__init__(model)
        self.tokens = tokens

    def propose(self, batch: DraftBatch) -> Draft:
        if batch.answer_lens is None:
            raise ValueError("sequence initialisation needs to know how long the answers are")
        begun = batch.answer_lens >= self.tokens
        return self.model.propose(
            replace(batch, draft_mask=begun if batch.draft_mask is None else batch.draft_mask & begun)
        )
