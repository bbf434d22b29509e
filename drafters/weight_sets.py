"""Several weight sets of one drafter model in memory: each request is drafted with its own, on shared draft state.

Every KV slot belongs to one request, or to a prefix shared by requests of the same set, so one set writes and reads its
draft state. Each set drafts in a batch of its own, so its drafts do not depend on another set's weights, texts or
number of requests.
"""

from collections.abc import Iterator

import torch

from .base import Draft, DraftBatch, Drafter, Features
from .block.drafter import BlockDrafter
from .wrappers import Wrapper


class WeightSets(Wrapper):
    """`model`, with the weights of set 0, and further drafters of the same shape; for CPU tensors. Requests of a
    missing set are drafted with set 0."""

    def __init__(self, model: BlockDrafter):
        super().__init__(model)
        self._start = model
        self.others: dict[int, BlockDrafter] = {}

    def reload(self, checkpoint: str, number: int = 0) -> None:
        if number:
            self.others[number] = self._start.beside(checkpoint)
        else:
            self._start.reload(checkpoint)

    def drop(self, number: int) -> None:
        self.others.pop(number, None)

    def observe(self, features: Features) -> None:
        for drafter, tokens in self._parts(features.sets):
            if tokens is None:
                drafter.observe(features)
                continue
            hidden = None if features.hidden is None else features.hidden[tokens]
            drafter.observe(
                Features(hidden, features.tokens[tokens], features.positions[tokens], features.slots[tokens])
            )

    def propose(self, batch: DraftBatch) -> Draft:
        mask = batch.draft_mask
        if mask is not None and not bool(mask.all()):
            drafting = mask.nonzero()[:, 0]
            if len(drafting) == 0:
                return self._start.propose(batch)
            return self.propose(batch.select(drafting)).spread(drafting, batch.anchors)
        made = [
            (requests, drafter.propose(batch if requests is None else batch.select(requests)))
            for drafter, requests in self._parts(batch.sets)
        ]
        if (first := made[0])[0] is None:
            return first[1]
        return joined([(requests, draft) for requests, draft in made if requests is not None])

    def _parts(self, sets: torch.Tensor | None) -> Iterator[tuple[Drafter, torch.Tensor | None]]:
        """Yield each drafter with the indices of its tokens or requests; None: all."""
        numbers = {0} if sets is None else {n if n in self.others else 0 for n in sets.unique().tolist()}
        if len(numbers) <= 1:
            number = next(iter(numbers), 0)
            yield self.others.get(number, self._start), None
            return
        assert sets is not None
        left = torch.ones_like(sets, dtype=torch.bool)
        for number in sorted(numbers - {0}):
            left &= sets != number
            yield self.others[number], (sets == number).nonzero()[:, 0]
        if 0 in numbers:
            yield self._start, left.nonzero()[:, 0]


def joined(parts: list[tuple[torch.Tensor, Draft]]) -> Draft:
    """Join drafts of parts of a batch, each with its request numbers [M], which together are all R. Where vocabularies
    differ, q has the columns of all of them. The probs of a part that has none are not read."""
    drafts = [draft for _, draft in parts]
    places = torch.cat([requests for requests, _ in parts]).argsort()
    tokens, lens, confidence = (
        torch.cat([getattr(draft, name) for draft in drafts])[places] for name in ("tokens", "lens", "confidence")
    )
    drafting = sum(draft.drafting for draft in drafts)
    wanted = [draft for draft in drafts if draft.probs is not None]
    if not wanted:
        return Draft(tokens, lens, confidence, drafting=drafting)
    vocab = common_vocab([draft.vocab for draft in wanted])
    probs = torch.cat([widened_probs(draft, wanted[0], vocab) for draft in drafts])[places]
    return Draft(tokens, lens, confidence, probs, vocab, drafting=drafting)


def common_vocab(vocabs: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the union of vocabularies [V'], ascending; None where none is given."""
    known = [vocab for vocab in vocabs if vocab is not None]
    if not known or all(torch.equal(vocab, known[0]) for vocab in known[1:]):
        return known[0] if known else None
    return torch.cat(known).unique()


def widened_probs(draft: Draft, like: Draft, vocab: torch.Tensor | None) -> torch.Tensor:
    """Return a draft's q with the columns of `vocab`; zeros shaped like that of `like` where it has none."""
    assert like.probs is not None
    width = like.probs.shape[2] if vocab is None else len(vocab)
    shape = len(draft.lens), like.probs.shape[1], width
    if draft.probs is None:
        return like.probs.new_zeros(shape)
    if vocab is None or draft.vocab is None or len(draft.vocab) == width:
        return draft.probs
    widened = draft.probs.new_zeros(shape)
    widened[:, :, torch.searchsorted(vocab, draft.vocab)] = draft.probs
    return widened
