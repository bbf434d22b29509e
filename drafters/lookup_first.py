"""A drafter model that first checks whether the text is repeating itself.

Prompt lookup is nearly free and keeps being right where an answer quotes or repeats; a trained drafter is right more
often elsewhere. The choice between them uses only facts known before either draws its first token, so it cannot favour
one outcome of that draw over another.
"""

from dataclasses import replace

import torch

from outrider.kernels.cuda import native as cuda

from .base import Draft, DraftBatch, Drafter, Features
from .ngram import NgramDrafter
from .wrappers import Wrapper

LOOKUP_THRESHOLD = 1.2
"""Expected accepted tokens of a lookup, cut to the model's gamma, from which it is taken without running the model."""


class LookupFirst(Wrapper):
    """Drafts by `lookup` where that promises more than `model`, which runs only where the lookup is unsure.

    A lookup may be longer than the model's drafts. On a CPU it is cut to the length of q, where the model gives q.
    expected_run_length: the model's expected accepted tokens over its chance of the first (`registry.DrafterEntry`).
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
        looked_up = self.lookup.propose(batch)
        if cuda.fits(looked_up.confidence):
            return self._choose(looked_up, self.model.propose(batch))
        expected = looked_up.confidence[:, : self.model.gamma].cumprod(1).sum(1)
        unsure = expected < LOOKUP_THRESHOLD
        if not unsure.is_cpu:  # the host cannot read who is unsure: the model drafts for all
            drafted = self.model.propose(batch)
            better = unsure & (drafted.lens > 0) & (expected < self.expected_run_length * drafted.confidence[:, 0])
            return choose_each(looked_up, drafted, better)
        selected = (unsure if batch.draft_mask is None else unsure & batch.draft_mask).nonzero()[:, 0]
        if len(selected) == 0:
            return looked_up
        everyone = len(selected) == len(batch.rows)
        drafted = self.model.propose(batch if everyone else batch.select(selected))
        better = expected[selected] < self.expected_run_length * drafted.confidence[:, 0]
        if everyone and bool(better.all()):
            return replace(drafted, looked_up=torch.zeros_like(better)).widened(self.gamma)
        return merge(looked_up, drafted, selected, better, batch.temperatures)

    def _choose(self, found: Draft, drafted: Draft) -> Draft:
        """`propose` by one kernel."""
        tokens, lens, confidence, looked_up = cuda.drafts.choose(
            found.tokens, found.lens, found.confidence, drafted.tokens, drafted.lens, drafted.confidence,
            LOOKUP_THRESHOLD, self.expected_run_length,
        )  # fmt: skip
        points = None if drafted.probs is None else looked_up
        return Draft(tokens, lens, confidence, drafted.probs, drafted.vocab, looked_up, drafted.drafting, points=points)


def choose_each(looked_up: Draft, drafted: Draft, better: torch.Tensor) -> Draft:
    """Return `merge` of R lookups and R model drafts: the model's where `better` [R]. Works on any device without
    waiting for it. q stays in place; lookups are marked as point masses, however long."""
    model = drafted.widened(looked_up.tokens.shape[1])
    tokens = torch.where(better[:, None], model.tokens, looked_up.tokens)
    lens = torch.where(better, model.lens, looked_up.lens)
    confidence = torch.where(better[:, None], model.confidence, looked_up.confidence)
    points = None if drafted.probs is None else ~better
    return Draft(tokens, lens, confidence, drafted.probs, drafted.vocab, ~better, drafted.drafting, points=points)


def merge(
    looked_up: Draft, drafted: Draft, selected: torch.Tensor, better: torch.Tensor, temperatures: torch.Tensor
) -> Draft:
    """Replace lookups of R requests by the model's draft, for the M `selected` requests, where that is `better` [M].

    If the model gives q, a lookup's q is a point mass on each token. The lookup is then cut to the length of q, and,
    unless the request is greedy, before a token that the model's vocabulary lacks.
    """
    taken, length = selected[better], drafted.tokens.shape[1]
    tokens, lens, confidence = looked_up.tokens.clone(), looked_up.lens.clone(), looked_up.confidence.clone()
    tokens[taken, :length], lens[taken] = drafted.tokens[better], drafted.lens[better]
    confidence[taken, :length], confidence[taken, length:] = drafted.confidence[better], 0.0
    lookups = torch.ones_like(lens, dtype=torch.bool)
    lookups[taken] = False
    probs = None
    if drafted.probs is not None:
        probs, lens = point_masses(drafted, tokens, lens, lookups & (temperatures > 0))
        probs[taken] = drafted.probs[better]
    across = None if looked_up.across is None else looked_up.across & lookups
    by_grammar = None if looked_up.by_grammar is None else looked_up.by_grammar & lookups
    return Draft(
        tokens, lens, confidence, probs, drafted.vocab, lookups, drafted.drafting, across, by_grammar=by_grammar
    )


def point_masses(
    drafted: Draft, tokens: torch.Tensor, lens: torch.Tensor, sampled: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q [R, G, V'] with point masses on tokens [R, gamma], shaped as that of `drafted`, and lengths [R]. Lengths
    are cut to G, and for `sampled` lookups [R] before the first token that the model's vocabulary lacks."""
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
