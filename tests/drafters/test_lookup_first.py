"""Lookup together with a model: q is the drawn distribution, and choices never depend on the draw."""

import pytest
import torch
from shown_texts import show

from outrider.drafters.base import Draft, DraftBatch, Drafter, Features
from outrider.drafters.lookup_first import LookupFirst, choose_each, merge
from outrider.drafters.ngram import NgramDrafter
from outrider.kernels.acceptance import Verification, with_point_masses

GAMMA, CONTEXT, VOCAB = 4, 64, torch.tensor([0, 3, 5, 7, 8, 9])
LONG = 10
LOOPING = [5, 7, 9] * 8
FRESH = [1, 2, 3, 4, 6]
OUTSIDE = [5, 2, 9] * 8  # 2 is not in the model's vocabulary


class Model(Drafter):
    """Always draws 7, with a confidence that depends on the token before."""

    def __init__(self, sure: float):
        self.gamma, self.sure = GAMMA, sure
        self.asked: list[int] = []

    def allocate(self, slots: int) -> None: ...

    def observe(self, features: Features) -> None: ...

    def propose(self, batch: DraftBatch) -> Draft:
        count = len(batch.anchors)
        self.asked.append(count)
        probs = None
        if bool((batch.temperatures > 0).any()):
            probs = torch.full((count, GAMMA, len(VOCAB)), 0.1)
            probs[:, :, 3] = 0.5
        tokens = torch.full((count, GAMMA), 7)
        return Draft(
            tokens, torch.full((count,), GAMMA), torch.full((count, GAMMA), self.sure), probs, VOCAB, drafting=count
        )


def propose(
    texts: list[list[int]],
    temperatures: list[float],
    sure: float = 0.5,
    length: int = GAMMA,
    *,
    expected_run_length: float = 2.0,
    draft_mask: list[bool] | None = None,
) -> tuple[Draft, Model]:
    model = Model(sure)
    drafter = LookupFirst(NgramDrafter(length), model, expected_run_length=expected_run_length)
    mask = None if draft_mask is None else torch.tensor(draft_mask)
    batch = show(drafter, texts, CONTEXT, temperatures=torch.tensor(temperatures), draft_mask=mask)
    return drafter.propose(batch), model


def test_the_model_drafts_only_where_the_text_does_not_repeat():
    draft, model = propose([LOOPING, FRESH, LOOPING], [0.0, 0.0, 0.0])
    assert model.asked == [1]
    assert draft.tokens.tolist() == [[5, 7, 9, 5], [7, 7, 7, 7], [5, 7, 9, 5]]
    assert draft.lens.tolist() == [GAMMA] * 3
    assert draft.probs is None
    assert propose([LOOPING, LOOPING], [0.0, 1.0])[1].asked == []


def test_an_unsure_lookup_gives_way_to_a_surer_model():
    once = [5, 7, 9, 1, 2, 3, 4, 5, 7]
    assert propose([once], [1.0], sure=0.05)[0].tokens[0, 0] == 9
    assert propose([once], [1.0], sure=0.99)[0].tokens[0, 0] == 7
    draft = propose([once], [1.0], sure=0.99, expected_run_length=0.1)[0]
    assert draft.tokens[0, 0] == 9  # the model's drafts end after one token


def test_q_is_a_point_mass_where_the_lookup_drafted():
    draft, _ = propose([LOOPING, FRESH], [1.0, 1.0])
    column = torch.searchsorted(VOCAB, draft.tokens[0])
    assert torch.equal(draft.probs[0], torch.nn.functional.one_hot(column, len(VOCAB)).float())
    assert torch.equal(draft.probs[1, :, 3], torch.full((GAMMA,), 0.5))


def test_a_sampled_lookup_ends_before_a_token_outside_q():
    draft, _ = propose([OUTSIDE, FRESH], [1.0, 1.0])
    assert draft.tokens[0].tolist() == [5, 2, 9, 5]
    assert draft.lens.tolist() == [1, GAMMA]
    greedy, _ = propose([OUTSIDE, FRESH], [0.0, 1.0])
    assert greedy.lens.tolist() == [GAMMA, GAMMA]  # a greedy request's q is not read


def test_the_choice_depends_on_the_first_confidence_alone():
    """Later confidences depend on the first draw; choosing by them would bias it."""

    class Hopeful(Model):
        def propose(self, batch: DraftBatch) -> Draft:
            draft = super().propose(batch)
            draft.confidence[:, 1:] = self.later
            return draft

    once = [5, 7, 9, 1, 2, 3, 4, 5, 7]
    drafts = []
    for later in (0.0, 1.0):
        model = Hopeful(0.3)
        model.later = later
        drafter = LookupFirst(NgramDrafter(GAMMA), model, expected_run_length=2.0)
        batch = show(drafter, [once], CONTEXT, temperatures=torch.tensor([1.0]))
        drafts.append(drafter.propose(batch).tokens[0].tolist())
    assert drafts[0] == drafts[1]


def test_a_lookup_may_be_longer_than_the_models_drafts():
    draft, _ = propose([LOOPING, FRESH], [0.0, 0.0], length=LONG)
    assert draft.tokens[0].tolist() == [5, 7, 9, 5, 7, 9, 5, 7, 9, 5]
    assert draft.tokens[1, :GAMMA].tolist() == [7] * GAMMA
    assert draft.lens.tolist() == [LONG, GAMMA]
    assert draft.confidence[1].tolist() == [0.5] * GAMMA + [0.0] * (LONG - GAMMA)
    assert bool((draft.confidence[0] > 0.5).all())
    for alone, _ in (propose([FRESH], [0.0], length=LONG), propose([FRESH], [1.0], length=LONG)):
        assert alone.tokens.shape == alone.confidence.shape == (1, LONG)
        assert alone.lens.tolist() == [GAMMA]
        assert alone.confidence[0, GAMMA:].tolist() == [0.0] * (LONG - GAMMA)
    assert propose([LOOPING], [1.0], length=LONG)[0].lens.tolist() == [LONG]


def test_lookups_in_a_batch_with_q_are_as_short_as_q():
    draft, _ = propose([LOOPING, LOOPING, FRESH], [0.0, 1.0, 1.0], length=LONG)
    assert draft.probs.shape == (3, GAMMA, len(VOCAB))
    assert draft.tokens.shape == draft.confidence.shape == (3, LONG)
    assert draft.lens.tolist() == [GAMMA] * 3
    short, _ = propose([LOOPING, LOOPING, FRESH], [0.0, 1.0, 1.0])
    assert torch.equal(draft.probs, short.probs)


def test_q_may_be_shorter_than_the_models_drafts():
    draft, _ = propose([LOOPING, LOOPING, LOOPING], [0.0] * 3, length=LONG)
    q = torch.full((1, 2, len(VOCAB)), 0.1)
    drafted = Draft(torch.full((1, 2), 7), torch.tensor([2]), torch.full((1, 2), 0.5), q, VOCAB).widened(GAMMA)
    merged = merge(draft, drafted, torch.tensor([2]), torch.tensor([True]), torch.tensor([0.0, 1.0, 1.0]))
    assert merged.lens.tolist() == [2, 2, 2]
    assert merged.probs.shape == (3, 2, len(VOCAB))
    column = torch.searchsorted(VOCAB, merged.tokens[1, :2])
    assert torch.equal(merged.probs[1], torch.nn.functional.one_hot(column, len(VOCAB)).float())
    assert torch.equal(merged.probs[2], q[0])


def test_lookups_shorter_than_the_models_drafts_are_refused():
    with pytest.raises(ValueError, match="at least as long as the model's drafts, 4, not 3"):
        LookupFirst(NgramDrafter(3), Model(0.5), expected_run_length=2.0)


def test_the_model_drafts_only_for_selected_requests() -> None:
    """Lookups remain, and drafts do not depend on the selection."""
    texts, heat = [FRESH, LOOPING, FRESH, LOOPING], [0.0] * 4
    everyone, _ = propose(texts, heat)
    some, model = propose(texts, heat, draft_mask=[True, True, False, False])
    assert model.asked == [1]
    assert (some.drafting, everyone.drafting) == (1, 2)
    assert some.looked_up.tolist() == [False, True, True, True]
    assert some.lens.tolist() == [GAMMA, GAMMA, 0, GAMMA]
    for row in (0, 1, 3):
        assert torch.equal(some.tokens[row], everyone.tokens[row])
        assert torch.equal(some.confidence[row], everyone.confidence[row])
    nobody, model = propose(texts, heat, draft_mask=[False] * 4)
    assert model.asked == []
    assert nobody.lens.tolist() == [0, GAMMA, 0, GAMMA]


@pytest.mark.parametrize("with_probs", [True, False])
def test_on_a_device_the_choice_is_the_same(with_probs):
    """On a device the model drafts for all."""
    generator = torch.Generator().manual_seed(0)
    count, wide = 40, LONG if not with_probs else GAMMA
    draft = Draft(
        torch.randint(0, 10, (count, wide), generator=generator),
        torch.randint(0, wide + 1, (count,), generator=generator),
        torch.rand(count, wide, generator=generator),
    )
    drafted = Draft(
        VOCAB[torch.randint(0, len(VOCAB), (count, GAMMA), generator=generator)], torch.full((count,), GAMMA),
        torch.rand(count, GAMMA, generator=generator),
        torch.rand(count, GAMMA, len(VOCAB), generator=generator) if with_probs else None, VOCAB, drafting=count,
    )  # fmt: skip
    better = torch.rand(count, generator=generator) < 0.5
    temperatures = torch.rand(count, generator=generator).round()
    expected = merge(draft, drafted, torch.arange(count), better, temperatures)
    got = choose_each(draft, drafted, better)
    drafts = torch.arange(wide) < expected.lens[:, None]
    assert torch.equal(got.lens, torch.where(better, GAMMA, draft.lens))
    assert (got.lens >= expected.lens).all()  # a point-mass lookup may have tokens that q lacks
    assert torch.equal(got.tokens[drafts], expected.tokens[drafts])
    assert torch.equal(got.confidence, expected.confidence)
    assert torch.equal(got.looked_up, expected.looked_up)
    assert got.drafting == count
    if with_probs:
        assert got.probs is drafted.probs
        assert torch.equal(got.points, ~better)
        batch = Verification(
            got.tokens, expected.lens, torch.zeros(count + 1), draft_probs=got.probs, vocab=VOCAB, points=got.points
        )
        spread = with_point_masses(batch, int(VOCAB.max()) + 10).draft_probs[:, :GAMMA]
        lookup = ~better & (temperatures > 0)
        drafts = drafts[:, :GAMMA] & (better | lookup)[:, None]
        assert torch.equal(spread[:, :, VOCAB][drafts], expected.probs[drafts])
