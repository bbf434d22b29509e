"""Sequence initialisation: a diffusion model drafts once an answer has some tokens (SpecDiff, section 4).

What an answer begins with is decided by the prompt's last words, which a drafter trained on running text knows least
of. Who drafts follows from the length of the text alone, so that it can favour no outcome of a draw.
"""

from __future__ import annotations

from dataclasses import replace

from .base import Draft, DraftBatch, Drafter, Features, Prefilled


class Initialised(Drafter):
    """`model`, which drafts for answers of at least `tokens` tokens; shorter ones are left to prompt lookup beside it,
    or go without drafts."""

    def __init__(self, model: Drafter, tokens: int):
        self.model, self.tokens = model, tokens
        self.gamma = model.gamma
        self.target_layers = model.target_layers
        self.shortens = model.shortens

    def allocate(self, slots: int) -> None:
        self.model.allocate(slots)

    def observe(self, features: Features) -> None:
        self.model.observe(features)

    def prefilled(self, chunks: Prefilled) -> None:
        self.model.prefilled(chunks)

    def propose(self, batch: DraftBatch) -> Draft:
        if not batch.look_up:  # to be measured
            return self.model.propose(batch)
        if batch.answer_lens is None:
            raise ValueError("sequence initialisation needs to know how long the answers are")
        begun = batch.answer_lens >= self.tokens
        return self.model.propose(
            replace(batch, draft_mask=begun if batch.draft_mask is None else batch.draft_mask & begun)
        )
