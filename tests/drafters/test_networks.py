"""Drafters of every network keep the drafter contract, on the host and as on a device."""

import dataclasses
from pathlib import Path

import pytest
import torch
from scenes import BLOCKS, DENOISERS, DEVICE, ENCODERS, GAMMA, HEADS, LAYERS, LENGTHS, VOCAB, Scene
from tiny_drafters import assert_same_draft, batch, check_draws_are_unseen, check_tokens_follow_q, row_of

from outrider.drafters import encoding
from outrider.drafters.base import Prefilled

SCENES = [*BLOCKS, *ENCODERS, *(name + DEVICE for name in ENCODERS)]
FOLLOWING = ["truncated", "wide", *LAYERS, "eagle wide", "wide diffusion in 1 steps", "wide diffusion in 2 steps"]
SHORTENING = [*BLOCKS, *HEADS, *LAYERS]
FOLLOWING += [name + DEVICE for name in FOLLOWING if name in (*HEADS, *DENOISERS)]
EACH_TEMPERATURE = pytest.mark.parametrize("temperature", [0.0, 0.8])


@pytest.fixture(params=SCENES)
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    made = Scene.named(request.param, tmp_path)
    if made.on_device:
        request.getfixturevalue("device")
    return made


def test_drafts_are_whole(scene: Scene) -> None:
    made, table = scene.observed()
    draft = made.propose(batch(table, [0, 1], [9, 30], 1.0))
    assert draft.tokens.shape == draft.confidence.shape == (2, GAMMA)
    assert draft.lens.tolist() == [GAMMA] * 2
    assert draft.probs.shape == (2, GAMMA, VOCAB if draft.vocab is None else len(draft.vocab))
    torch.testing.assert_close(draft.probs.sum(-1), torch.ones(2, GAMMA))
    assert ((draft.confidence > 0) & (draft.confidence < 1)).all()
    column = draft.tokens
    if draft.vocab is not None:
        assert (draft.vocab.diff() > 0).all()
        assert torch.isin(draft.tokens, draft.vocab).all()
        column = torch.searchsorted(draft.vocab, draft.tokens)
    assert (draft.probs.gather(2, column[..., None]) > 0).all()
    assert made.propose(batch(table, [0], [9])).probs is None


@EACH_TEMPERATURE
def test_requests_are_drafted_each_by_itself(scene: Scene, temperature: float) -> None:
    made, table = scene.observed()
    together = made.propose(batch(table, [2, 0, 1], [1, 9, 30], temperature))
    for place, (row, length) in enumerate([(2, 1), (0, 9), (1, 30)]):
        assert_same_draft(row_of(together, place), made.propose(batch(table, [row], [length], temperature)))


@EACH_TEMPERATURE
def test_unselected_requests_get_no_draft(scene: Scene, temperature: float) -> None:
    """A device drafts for all, and discards the rest."""
    made, table = scene.observed()
    asking = batch(table, [2, 0, 1], [1, 9, 30], temperature)
    some = made.propose(dataclasses.replace(asking, draft_mask=torch.tensor([True, False, True])))
    everyone = made.propose(asking)
    assert (everyone.drafting, some.drafting) == (3, 3 if scene.on_device else 2)
    assert some.lens.tolist() == [GAMMA, 0, GAMMA]
    for row in (0, 2):
        assert_same_draft(row_of(some, row), row_of(everyone, row))
    assert not some.confidence[1].any()
    nobody = made.propose(dataclasses.replace(asking, draft_mask=torch.zeros(3, dtype=torch.bool)))
    assert (nobody.drafting, nobody.lens.tolist()) == (3 if scene.on_device else 0, [0, 0, 0])


@pytest.mark.parametrize("scene", SHORTENING, indirect=True)
@EACH_TEMPERATURE
def test_a_draft_of_fewer_tokens_equals_a_smaller_drafters(scene: Scene, temperature: float) -> None:
    made, table = scene.observed()
    assert made.shortens
    asking = batch(table, [2, 0, 1], [1, 9, 30], temperature)
    asking = dataclasses.replace(asking, draft_mask=torch.tensor([True, True, False]))
    smaller, _ = scene.observed()
    for depth in range(1, GAMMA + 1):
        smaller.gamma = depth
        draft, wanted = made.propose(dataclasses.replace(asking, depth=depth)), smaller.propose(asking)
        assert draft.tokens.shape == draft.confidence.shape == (3, GAMMA)
        assert draft.lens.tolist() == [depth, depth, 0]
        assert torch.equal(draft.tokens[:2, :depth], wanted.tokens[:2])
        assert torch.equal(draft.confidence[:2, :depth], wanted.confidence[:2])
        assert not draft.confidence[:, depth:].any()
        if temperature:
            assert torch.equal(draft.probs, wanted.probs)
    assert made.propose(dataclasses.replace(asking, depth=GAMMA + 3)).lens.tolist() == [GAMMA, GAMMA, 0]


def test_no_token_is_seen_before_it_is_drawn(scene: Scene) -> None:
    made, table = scene.observed()
    assert check_draws_are_unseen(made, batch(table, [0, 1, 2], list(LENGTHS), 6.0))


@pytest.mark.slow
def test_drafts_do_not_depend_on_earlier_requests(scene: Scene) -> None:
    scene.check_history_is_forgotten()


@pytest.mark.slow
@pytest.mark.parametrize("scene", FOLLOWING, indirect=True)
def test_tokens_follow_q_exactly(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MOST", 1)  # all draws belong to one request, which a device encodes once for each
    made, table = scene.observed()
    made.prefilled(Prefilled(table, torch.tensor([0]), torch.tensor([9]), [9], 9))
    check_tokens_follow_q(made, table, positions=range(GAMMA), draws=2000 if scene.on_device else 4000)
