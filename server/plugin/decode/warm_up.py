"""Compile every variant of a decode step's kernels on a GPU before the server is ready.

Triton compiles a kernel at its first call, for seconds, with a variant for each combination of types, alignment,
numbers that are 1 or multiples of 16, and constants. In a step these depend on the power of two that holds the
requests, on whether a model has drafted, and on whether q is written. One step of every such kind runs here, without
graphs, on a row of the page table that no request uses.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from outrider.drafters.base import Draft, DraftBatch, Drafter
from outrider.kernels.drafts import admit, weigh_drafts
from outrider.kernels.ragged import FlatVerify, commit
from outrider.kernels.sampling import Rules

from .flatten import flatten
from .sampling import Sampling

WHOLE = 64
"""Requests beyond which drafts and acceptance have no further variants, only take more memory."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """requests: most requests. page_table: row 0 belongs to no request. vocabulary: columns of the target's logits.
    gamma: tokens of a draft. by_block: verify sampled drafts by block."""

    requests: int
    page_table: torch.Tensor
    vocabulary: int
    gamma: int
    by_block: bool


def numbers_of_requests(most: int) -> list[int]:
    """Return the powers of two below `most`, and `most`."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


@torch.inference_mode()
def run_all(shapes: Shapes, drafter: Drafter | None) -> None:
    """Draft, admit, flatten, accept and commit, for all kinds of batches; of more than WHOLE requests admit and flatten
    alone."""
    for requests in numbers_of_requests(min(shapes.requests, WHOLE)):
        for sampling in samplings(requests, shapes):
            step(requests, sampling, shapes, drafter)
    for requests in numbers_of_requests(shapes.requests):
        if requests > WHOLE:
            laid_out(Draft.nothing(requests, shapes.gamma, shapes.page_table.device), shapes)


def samplings(requests: int, shapes: Shapes) -> Iterator[Sampling]:
    """Yield greedy requests, and sampled ones with a seed among them, which use the kernels of every other batch."""
    device = shapes.page_table.device
    seeds, none = torch.zeros(requests, dtype=torch.int64, device=device), torch.zeros(requests, device=device)
    no, filters = none.bool(), (torch.full_like(seeds, 20), none + 0.9, none)
    yield Sampling(Rules(none, *filters), seeds, no, ~no, True, False, True)
    yield Sampling(Rules(none + 1, *filters), seeds, no, no, False, True, False, shapes.by_block)


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
    """Return verification lengths 0, and a batch of the anchors with as many padding tokens."""
    nothing = draft.lens * 0
    ends, like = nothing[:, None], (draft.confidence, draft.confidence)
    for parameters in (None, like):
        confidence, _ = weigh_drafts(draft.tokens, draft.confidence, nothing, nothing, ends, parameters)
    lens, _ = admit(confidence, nothing, nothing[:1])
    return lens, flatten(nothing, draft.tokens, lens, nothing, shapes.page_table, nothing, 2 * len(nothing))


def drafts(requests: int, sampling: Sampling, shapes: Shapes, drafter: Drafter | None) -> Iterator[Draft]:
    """Yield an empty draft, then the drafter's, lookups included."""
    yield Draft.nothing(requests, shapes.gamma, shapes.page_table.device)
    if drafter is None:
        return
    nothing = torch.zeros(requests, dtype=torch.int64, device=shapes.page_table.device)
    batch = DraftBatch(
        nothing, nothing, shapes.page_table, nothing, keys=sampling.draft_keys(nothing, shapes.gamma),
        wants_probs=not sampling.all_decided, decided=sampling.decided, all_greedy=sampling.all_greedy,
        answer_lens=nothing, longest=shapes.page_table.shape[1], **sampling.rules._asdict(),
    )  # fmt: skip
    yield drafter.propose(batch)
