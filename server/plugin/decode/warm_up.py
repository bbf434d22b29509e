"""Every variant of the kernels of a decode step, compiled on a GPU before the server is ready.

Triton compiles a kernel when it is first called, in seconds that all running requests would wait for. Variants differ
by the power of two that holds the requests, by whether their number is even, on which the alignment of some addresses
depends, and by what a batch wants of sampling. So steps of every such kind are run here, on a row of the page table
that belongs to no request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from outrider.drafters.base import Draft, DraftBatch, Drafter
from outrider.kernels.drafts import admit
from outrider.kernels.ragged import commit
from outrider.kernels.sampling import Rules

from ..spec_inputs import FlatVerify, flatten
from .sampling import Sampling

WHOLE = 64
"""Requests from which on drafts and acceptance have no further variants, but take memory."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """requests: at most. page_table: whose row 0 is nobody's. vocabulary: columns of the target's logits. gamma: tokens
    of a draft. by_block: how sampled drafts are verified."""

    requests: int
    page_table: torch.Tensor
    vocabulary: int
    gamma: int
    by_block: bool


def numbers_of_requests(most: int) -> list[int]:
    """Numbers from 1 to `most` that have every variant: powers of two, the number before each, and the last two."""
    found, power = {most, max(most - 1, 1)}, 1
    while power < most:
        found |= {power, max(power - 1, 1)}
        power *= 2
    return sorted(found)


@torch.inference_mode()
def run_all(shapes: Shapes, drafter: Drafter | None) -> None:
    """Draft, admit, flatten, accept and commit, for all kinds of batches; of more than WHOLE requests admit and flatten
    alone."""
    for requests in numbers_of_requests(min(shapes.requests, WHOLE)):
        for sampling in samplings(requests, shapes):
            step(requests, sampling, shapes, drafter)
    for requests in numbers_of_requests(shapes.requests):
        if requests > WHOLE:
            laid_out(undrafted(requests, shapes), shapes)


def samplings(requests: int, shapes: Shapes) -> Iterator[Sampling]:
    """Greedy, seeded and sampled batches, with rules and without."""
    device = shapes.page_table.device
    seeds, none = torch.zeros(requests, dtype=torch.int64, device=device), torch.zeros(requests, device=device)
    no, yes = none.bool(), none == 0
    filters = torch.full_like(seeds, 20), none + 0.9, none
    yield Sampling(Rules(none), seeds, no, yes, True, False, True)
    for filtered, seeded in product((False, True), (False, True)):
        rules = Rules(none + 1, *filters) if filtered else Rules(none + 1)
        yield Sampling(
            rules, seeds, yes if seeded else no, yes if seeded else no, False, seeded, seeded, shapes.by_block
        )
        if seeded:  # one alone
            yield Sampling(rules, seeds, no, no, False, True, False, shapes.by_block)


def step(requests: int, sampling: Sampling, shapes: Shapes, drafter: Drafter | None) -> None:
    device = shapes.page_table.device
    nothing = torch.zeros(requests, dtype=torch.int64, device=device)
    sampling.draw(torch.zeros(requests, shapes.vocabulary, device=device), nothing)
    for draft in drafts(requests, sampling, shapes, drafter):
        lens, flat = laid_out(draft, shapes)
        logits = torch.zeros(len(flat.request), shapes.vocabulary, device=device)
        accepted = sampling.accept(logits, draft, lens, flat)
        commit(*accepted, nothing, flat.request, flat.step, flat.slots)


def laid_out(draft: Draft, shapes: Shapes) -> tuple[torch.Tensor, FlatVerify]:
    """Lengths of none, and a batch of the anchors with as much padding."""
    nothing = draft.lens * 0
    for bounds, first in product((None, torch.ones_like(draft.confidence[0])), (None, nothing.bool())):
        lens, _ = admit(draft.confidence, nothing, nothing[:1], bounds=bounds, first=first)
    return lens, flatten(nothing, draft.tokens, lens, nothing, shapes.page_table, nothing, 2 * len(nothing))


def undrafted(requests: int, shapes: Shapes) -> Draft:
    block = torch.zeros((requests, shapes.gamma), device=shapes.page_table.device)
    return Draft(block.long(), block[:, 0].long(), block)


def drafts(requests: int, sampling: Sampling, shapes: Shapes, drafter: Drafter | None) -> Iterator[Draft]:
    """No drafts, lookups, and the model's."""
    yield undrafted(requests, shapes)
    if drafter is None:
        return
    nothing = torch.zeros(requests, dtype=torch.int64, device=shapes.page_table.device)
    batch = DraftBatch(
        nothing, nothing, shapes.page_table, nothing, keys=sampling.draft_keys(nothing, shapes.gamma),
        wants_probs=not sampling.all_decided, decided=sampling.decided, all_greedy=sampling.all_greedy,
        answer_lens=nothing, longest=shapes.page_table.shape[1], **sampling.rules._asdict(),
    )  # fmt: skip
    if drafter.looks_up:
        yield drafter.look_up(batch)
    yield drafter.propose(batch)
