"""A drafter model that first looks whether the text is repeating itself.

Prompt lookup costs next to nothing and is right for long where an answer quotes or repeats; a trained drafter is right
more often elsewhere. Which of the two drafts for a request is decided by what both know before their first token is
drawn, so that the choice cannot favour one outcome of that draw over another.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider.kernels.cuda import native as cuda

from .base import Draft, DraftBatch, Drafter, Features
from .ngram import NgramDrafter
from .wrappers import Wrapper

LOOKUP_THRESHOLD = 1.2
"""Expected accepted tokens, of as many as the model drafts, from which a lookup is taken without asking the model."""


class LookupFirst(Wrapper):
    """Drafts by `lookup` where that promises more than `model`, which is asked only where the lookup is unsure.

    A lookup may be longer than the model's drafts, except beside drafts with q, so that q need not be as long.
    expected_run_length: the model's expected accepted tokens over its chance of the first (`registry.Entry`).
    """

    def __init__(self, lookup: NgramDrafter, model: Drafter, *, expected_run_length: float):
        if lookup.gamma < model.gamma:
            raise ValueError(f"a lookup is at least as long as the model's drafts, {model.gamma}, not {lookup.gamma}")
        super().__init__(model)
        self.lookup, self.expected_run_length = lookup, expected_run_length
        self.gamma, self.looks_up, self.corpora = lookup.gamma, True, lookup.corpora

    def allocate(self, slots: int) -> None:
        self.lookup.allocate(slots)
        super().allocate(slots)

    def slot_state(self) -> list[torch.Tensor]:
        return [*self.lookup.slot_state(), *super().slot_state()]

    def observe(self, features: Features) -> None:
        self.lookup.observe(features)
        super().observe(features)

    def look_up(self, batch: DraftBatch) -> Draft:
        return self.lookup.propose(batch)

    def propose(self, batch: DraftBatch) -> Draft:
        found = self.lookup.propose(batch)
        if cuda.fits(found.confidence):
            return self._choose(found, self.model.propose(batch))
        expected = found.confidence[:, : self.model.gamma].cumprod(1).sum(1)
        unsure = expected < LOOKUP_THRESHOLD
        if not unsure.is_cpu:  # who is unsure, the host does not know: the model drafts for all
            drafted = self.model.propose(batch)
            better = unsure & (drafted.lens > 0) & (expected < self.expected_run_length * drafted.confidence[:, 0])
            return choose_each(found, drafted, better)
        selected = (unsure if batch.draft_mask is None else unsure & batch.draft_mask).nonzero()[:, 0]
        if len(selected) == 0:
            return found
        everyone = len(selected) == len(batch.rows)
        drafted = self.model.propose(batch if everyone else batch.select(selected))
        better = expected[selected] < self.expected_run_length * drafted.confidence[:, 0]
        if everyone and bool(better.all()):
            return replace(drafted, looked_up=torch.zeros_like(better)).widened(self.gamma)
        return merge(found, drafted, selected, better, batch.temperatures)

    def _choose(self, found: Draft, drafted: Draft) -> Draft:
        """`propose` by one kernel."""
        tokens, lens, confidence, looked_up = torch.ops.outrider_cuda.choose(
            found.tokens, found.lens, found.confidence, drafted.tokens, drafted.lens, drafted.confidence,
            LOOKUP_THRESHOLD, self.expected_run_length,
        )  # fmt: skip
        points = None if drafted.probs is None else looked_up
        return Draft(tokens, lens, confidence, drafted.probs, drafted.vocab, looked_up, drafted.drafting, points=points)


def choose_each(found: Draft, drafted: Draft, better: torch.Tensor) -> Draft:
    """`merge` of R lookups and R drafts of the model, of which those are taken that are `better` [R]; on any device and
    without waiting for it. q stays where it is, and lookups are said to be point masses, however long they are."""
    model = drafted.widened(found.tokens.shape[1])
    tokens = torch.where(better[:, None], model.tokens, found.tokens)
    lens = torch.where(better, model.lens, found.lens)
    confidence = torch.where(better[:, None], model.confidence, found.confidence)
    points = None if drafted.probs is None else ~better
    return Draft(tokens, lens, confidence, drafted.probs, drafted.vocab, ~better, drafted.drafting, points=points)


def merge(
    found: Draft, drafted: Draft, selected: torch.Tensor, better: torch.Tensor, temperatures: torch.Tensor
) -> Draft:
    """The lookups `found` of R requests, replaced for the M `selected` where the model's draft is `better` [M].

    Where q is given at all, a lookup's is a point mass on its token; its draft is then no longer than q, and ends
    before a token that the model's vocabulary lacks, unless the request is greedy.
    """
    taken, length = selected[better], drafted.tokens.shape[1]
    tokens, lens, confidence = found.tokens.clone(), found.lens.clone(), found.confidence.clone()
    tokens[taken, :length], lens[taken] = drafted.tokens[better], drafted.lens[better]
    confidence[taken, :length], confidence[taken, length:] = drafted.confidence[better], 0.0
    lookups = torch.ones_like(lens, dtype=torch.bool)
    lookups[taken] = False
    probs = None
    if drafted.probs is not None:
        probs, lens = point_masses(drafted, tokens, lens, lookups & (temperatures > 0))
        probs[taken] = drafted.probs[better]
    across = None if found.across is None else found.across & lookups
    return Draft(tokens, lens, confidence, probs, drafted.vocab, lookups, drafted.drafting, across)


def point_masses(
    drafted: Draft, tokens: torch.Tensor, lens: torch.Tensor, sampled: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [R, G, V'] of point masses on tokens [R, gamma], as wide and long as that of `drafted`; and the lengths [R],
    within q, and where requests are `sampled` lookups [R] only up to a token that the model's vocabulary lacks."""
    assert drafted.probs is not None
    length, width = drafted.probs.shape[1:]  # shorter than the tokens where fewer were drafted
    column = named = tokens[:, :length].contiguous()
    known = torch.ones_like(named, dtype=torch.bool)
    if drafted.vocab is not None:
        column = torch.searchsorted(drafted.vocab, named).clamp(max=len(drafted.vocab) - 1)
        known = drafted.vocab[column] == named
    probs = drafted.probs.new_zeros(len(tokens), length, width)
    probs.scatter_(2, column[:, :, None], known[:, :, None].to(probs.dtype))
    reach = torch.where(sampled, known.long().cumprod(1).sum(1), length)
    return probs, torch.minimum(lens, reach)
