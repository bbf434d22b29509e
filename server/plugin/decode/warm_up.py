"""Compile every variant of a decode step's kernels on a GPU before the server is ready.

Triton compiles a kernel at its first call, for seconds, with a variant for each combination of types, alignment,
numbers that are 1 or multiples of 16, and constants. In a step these depend on the power of two that holds the
requests, on whether a model has drafted, and on whether q is written. One step of every such kind runs here, without
graphs, on a row of the page table that no request uses.
"""

import torch

from outrider.drafters.base import Draft, DraftBatch, Drafter
from outrider.kernels.drafts import admit, weigh_drafts
from outrider.kernels.ragged import FlatVerify, commit
from outrider.kernels.sampling import Rules

from .flatten import flatten
from .sampling import Sampling

WHOLE = 64
"""Requests beyond which drafts and acceptance have no further variants, only take more memory."""


def numbers_of_requests(most: int) -> list[int]:
    """Return the powers of two below `most`, and `most`."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


@torch.inference_mode()
def run_all(
    most: int, table: torch.Tensor, vocabulary: int, gamma: int, drafter: Drafter | None, *, by_block: bool
) -> None:
    """Draft, admit, flatten, accept and commit, for all kinds of batches; of more than WHOLE requests admit and flatten
    alone.

    most: requests. table: the page table; row 0 belongs to no request. vocabulary: columns of the target's logits.
    gamma: tokens of a draft. by_block: as in `Sampling`.
    """
    for requests in numbers_of_requests(most):
        nothing, empty = table.new_zeros(requests, dtype=torch.int64), Draft.nothing(requests, gamma, table.device)
        if requests > WHOLE:
            laid_out(empty, table)
            continue
        for sampling in samplings(nothing, by_block):
            sampling.draw(table.new_zeros((requests, vocabulary), dtype=torch.float32), nothing)
            for draft in [empty] if drafter is None else [empty, drafter.propose(batch_of(sampling, table, gamma))]:
                lens, flat = laid_out(draft, table)
                logits = table.new_zeros((len(flat.request), vocabulary), dtype=torch.float32)
                accepted = sampling.accept(logits, draft, lens, flat)
                commit(*accepted, nothing, flat.request, flat.step, flat.slots)


def samplings(seeds: torch.Tensor, by_block: bool) -> list[Sampling]:
    """Return greedy requests, and sampled ones with a seed among them, which use the kernels of every other batch."""
    none = seeds.float()
    no, filters = none.bool(), (torch.full_like(seeds, 20), none + 0.9, none)
    greedy = Sampling(Rules(none, *filters), seeds, no, ~no, True, False, True)
    return [greedy, Sampling(Rules(none + 1, *filters), seeds, no, no, False, True, False, by_block)]


def laid_out(draft: Draft, table: torch.Tensor) -> tuple[torch.Tensor, FlatVerify]:
    """Return verification lengths 0, and a batch of the anchors with as many padding tokens."""
    nothing = draft.lens * 0
    ends, like = nothing[:, None], (draft.confidence, draft.confidence)
    for parameters in (None, like):
        confidence, _ = weigh_drafts(draft.tokens, draft.confidence, nothing, nothing, ends, parameters)
    lens, _ = admit(confidence, nothing, nothing[:1])
    return lens, flatten(nothing, draft.tokens, lens, nothing, table, nothing, 2 * len(nothing))


def batch_of(sampling: Sampling, table: torch.Tensor, gamma: int) -> DraftBatch:
    """Return requests without a text to draft for."""
    nothing = sampling.seeds * 0
    return DraftBatch(
        nothing, nothing, table, nothing, keys=sampling.draft_keys(nothing, gamma),
        wants_probs=not sampling.all_decided, decided=sampling.decided, all_greedy=sampling.all_greedy,
        answer_lens=nothing, longest=table.shape[1], **sampling.rules._asdict(),
    )  # fmt: skip
