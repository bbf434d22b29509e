"""Steps cut in a device's memory equal those cut on the host."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from margins import assert_near
from tiny_drafters import DFLASH2, DIFFUSION, LILICORR, TERMS, TINY, make_diffusion, make_model, make_sequence
from tiny_eagle import LAYER_IDS, VOCAB, save_eagle

from outrider.drafters.eagle.model import EagleModel
from outrider.drafters.training.batches import BatchMaker, TrainingStep, random_steps
from outrider.drafters.training.forward import FrozenTarget, frozen_part, hidden_states
from outrider.drafters.training.loop import learn_from
from outrider.drafters.training.loss import LossWeights
from outrider.drafters.training.masked import block_states, mask_blocks
from outrider.drafters.training.resident import ResidentStore
from outrider.drafters.training.store import FeatureStore

CPU = torch.device("cpu")
LOSSES = LossWeights(ce=0.1, tv=0.9, kl=0.3, kl_falloff=1.0, survival=True)
SHAPES = [(90, 4), (30, 6), (40, 9), (12, 3)]
"""(tokens, prompt) of the sequences."""
CHOSEN = [2, 0, 1]


def filled(folder: Path, width: int) -> FeatureStore:
    torch.manual_seed(0)
    store = FeatureStore(folder, width=width, top=3, meta={})
    with store.writing():
        for length, prompt in SHAPES:
            store.append(make_sequence(length, prompt, width), temperature=0.0, source="x")
    return store


def both_steps(store: FeatureStore, maker: BatchMaker, size: int) -> tuple[TrainingStep, TrainingStep]:
    """A step of five anchors of each chosen sequence, some reaching past the answer's end, cut in both places. Answers
    are so long that no anchor occurs twice."""
    points = torch.rand(len(CHOSEN), 5, generator=torch.Generator().manual_seed(1))
    points[:, -1] = 0.99  # the last possible anchor
    resident = ResidentStore(store, CPU).cut(CHOSEN, points, maker, size)
    anchors = list(resident.anchor_positions.view(points.shape))
    assert not resident.valid.all()
    assert all(len(at.unique()) == 5 for at in anchors)
    return maker.cut([store[i] for i in CHOSEN], anchors, size), resident


@pytest.mark.parametrize("kind", ["dspark", "dflash2", "lilicorr", "eagle3", "diffusion"])
def test_both_cuts_give_the_same_steps(kind: str, tmp_path: Path) -> None:
    width = {"eagle3": len(LAYER_IDS) * 32, "diffusion": 0}.get(kind, 96)
    blocks = {"dspark": TINY, "dflash2": DFLASH2, "lilicorr": LILICORR}
    store = filled(tmp_path / "features", width)
    embedding, head = torch.randn(2, 96, 32, generator=torch.Generator().manual_seed(7))
    gradients = []
    for number in (0, 1):
        frozen, decay = FrozenTarget(embedding, head), None
        if kind in blocks:
            model = make_model(blocks[kind])
        elif kind == "diffusion":
            model, decay = make_diffusion(DIFFUSION), float("inf")
        else:
            folder = save_eagle(tmp_path / f"{number}", "authors")
            model = EagleModel.load(folder, 6, embedding.shape, dtype=torch.float32)
            frozen = frozen_part(model, SimpleNamespace(embedding=embedding, head=head, device=CPU))
        model.requires_grad_(True)
        maker = BatchMaker(model.config, model.vocab, device=CPU, decay=decay, tile=3)
        step = both_steps(store, maker, 4)[number]
        if kind == "diffusion":
            draw = torch.Generator().manual_seed(2)
            masked = torch.rand(15, 4, generator=draw) < 0.6
            masked[:, -1] = masked[:, 0] = True
            hidden = mask_blocks(step, masked, torch.rand(15, 4, generator=draw))
            states = block_states(model, frozen, hidden.step, step.tokens[:, :-1], hidden.revealed)
            logged = learn_from(model, frozen, hidden.step, states, replace(LOSSES, survival=False), alpha_conf=1.0)
        else:
            states = hidden_states(model, frozen, step, 4)
            logged = learn_from(model, frozen, step, states, LOSSES, alpha_conf=1.0)
        named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert len(named) > 10
        gradients.append(named | logged)
    assert gradients[0].keys() == gradients[1].keys()
    for name, exact in gradients[0].items():
        size = exact.abs().amax().clamp(min=1e-30)
        assert_near(gradients[1][name] / size, exact / size, TERMS)


CUTS = {"host": random_steps, "device": lambda store, *of, **how: ResidentStore(store, CPU).steps(*of, **how)}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_steps_depend_on_seed_and_number_only(cut: Callable[..., Iterator[TrainingStep]], tmp_path: Path) -> None:
    store, options = filled(tmp_path / "features", 96), {"sequences": 3, "anchors": 5, "size": 4, "seed": 1}
    maker = BatchMaker(TINY, torch.arange(VOCAB), device=CPU, tile=3)
    first, later = (cut(store, [0, 1, 2, 3], maker, step=step, **options) for step in (0, 2))
    one, two, three = (next(first) for _ in range(3))
    assert torch.equal(three.tokens, next(later).tokens)
    assert not torch.equal(three.tokens, two.tokens)
    # a block holds the tokens after its anchor, and a tile hides all from the anchor on
    assert torch.equal(one.tokens[:, 0], one.anchor_positions)
    for tile in one.tiles:
        assert torch.equal((~tile.hidden).sum(-1).flatten(), one.anchor_positions[tile.blocks])


def test_requesting_more_sequences_than_exist(tmp_path: Path) -> None:
    store = filled(tmp_path / "features", 96)
    maker = BatchMaker(TINY, torch.arange(VOCAB), device=CPU)
    steps = ResidentStore(store, CPU).steps([0, 1], maker, sequences=64, anchors=9, size=4, seed=0, step=0)
    assert len(next(steps).anchors) == 2 * 9
