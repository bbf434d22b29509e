"""Prompt lookup along known answers agrees with the served choice between lookup and model."""

import torch

from outrider.drafters.base import Draft, DraftBatch, Drafter, Features
from outrider.drafters.learning.lookups import Lookups
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.registry import find
from outrider.drafters.training.store import Sequence

GAMMA, LOOKUP_GAMMA = 4, 15


class Sure(Drafter):
    """Drafts token 1 with the same confidence everywhere."""

    gamma = GAMMA

    def __init__(self, confidence: float) -> None:
        self.confidence = confidence

    def observe(self, features: Features) -> None:
        pass

    def propose(self, batch: DraftBatch) -> Draft:
        shape = len(batch.rows), GAMMA
        lens = torch.full(shape[:1], GAMMA)
        return Draft(
            torch.ones(shape).long(), lens, torch.full(shape, self.confidence), drafting=torch.ones(shape[:1]).bool()
        )


def answer(*, copied: int) -> Sequence:
    """A prompt of 30 tokens and an answer that quotes some of them between others."""
    generator = torch.Generator().manual_seed(copied)
    prompt = torch.randperm(90, generator=generator)[:30] + 5
    own = torch.randint(5, 95, (12,), generator=generator)
    tokens = torch.cat([prompt, own[:6], prompt[4 : 4 + copied], own[6:]])
    nothing = torch.zeros(len(tokens) - 30, 1)
    return Sequence(tokens, 30, torch.zeros(len(tokens), 0), nothing.long(), nothing)


def served(s: Sequence, confidence: float) -> Draft:
    """Drafts of `LookupFirst` after each token of the answer."""
    both = LookupFirst(
        NgramDrafter(LOOKUP_GAMMA), Sure(confidence), expected_run_length=find("dspark").expected_run_length
    )
    both.allocate(len(s.tokens))
    rows = torch.zeros(len(s.tokens) - 1 - s.prompt, dtype=torch.int64)
    both.lookup.history.write(torch.arange(len(s.tokens)), s.tokens)
    at = torch.arange(s.prompt, len(s.tokens) - 1)
    return both.propose(
        DraftBatch(
            anchors=s.tokens[at], seq_lens=at, page_table=torch.arange(len(s.tokens))[None].int(), rows=rows,
            temperatures=rows.float(), keys=rows[:, None], all_greedy=True, wants_probs=False,
        )
    )  # fmt: skip


def test_the_model_is_asked_where_it_is_when_served() -> None:
    lookups, both = Lookups("dspark", LOOKUP_GAMMA), set()
    for copied in (0, 3, 8, 20):
        s = answer(copied=copied)
        expected, accepted = lookups.along(s, GAMMA)
        for confidence in (0.0, 0.2, 0.5, 1.0):
            draft = served(s, confidence)
            taken = lookups.taken(expected, torch.full((len(expected), GAMMA), confidence))
            assert torch.equal(draft.looked_up & (draft.lens > 0), taken & (expected > 0))
            both |= set(taken.tolist())
        sure = served(s, 1e9)  # whatever the model says
        assert torch.equal(lookups.asked(s, GAMMA), s.prompt + (~sure.looked_up).nonzero()[:, 0])
        runs = [
            next((n for n in range(LOOKUP_GAMMA) if at + n >= len(s.tokens) or s.tokens[at + n] != draft_token[n]), 15)
            for at, draft_token in enumerate(sure.tokens.tolist(), s.prompt + 1)
        ]
        assert accepted[sure.looked_up].tolist() == [
            run for run, there in zip(runs, sure.looked_up, strict=True) if there
        ]
    assert both == {True, False}


def test_without_lookup_the_model_is_asked_everywhere() -> None:
    s, lookups = answer(copied=20), Lookups("dspark", 0)
    expected, accepted = lookups.along(s, GAMMA)
    assert not expected.any()
    assert not accepted.any()
    assert not lookups.taken(expected, torch.ones(len(expected), GAMMA)).any()
    assert len(lookups.asked(s, GAMMA)) == len(s.tokens) - 1 - s.prompt
