"""Training steps cut from a store."""

from pathlib import Path

import pytest
import torch
from margins import assert_near
from tiny_drafters import TERMS, TINY, make_model, make_sequence

from outrider.drafters.training import batches
from outrider.drafters.training.batches import BatchMaker, random_steps
from outrider.drafters.training.forward import FrozenTarget
from outrider.drafters.training.loop import train_step
from outrider.drafters.training.loss import LossWeights
from outrider.drafters.training.store import FeatureStore


def test_steps_depend_on_seed_and_number_only(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path / "f", width=96, top=3, meta={})
    for length in (9, 12, 20, 8):
        store.append(make_sequence(length, 4, 96), temperature=0.0, source="x")
    maker = BatchMaker(TINY, torch.arange(96), device=torch.device("cpu"), tile=3)
    options = {"sequences": 2, "anchors": 5, "size": 4, "seed": 1}
    first = random_steps(store, [0, 1, 2, 3], maker, step=0, **options)
    later = random_steps(store, [0, 1, 2, 3], maker, step=1, **options)
    next(first)
    second, again = next(first), next(later)
    assert torch.equal(second.tokens, again.tokens)
    # a block holds the tokens after its anchor, and a tile hides all from the anchor on
    assert torch.equal(second.tokens[:, 0], second.anchor_positions)
    for tile in second.tiles:
        seen = (~tile.hidden).sum(-1).flatten()
        assert torch.equal(seen, second.anchor_positions[tile.blocks])


def test_empty_context_rows_have_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sequences = [make_sequence(length, 4, 96) for length in (70, 20)]
    frozen = FrozenTarget(torch.randn(96, 32), torch.randn(96, 32))
    gradients = []
    for rows in (1, 64):
        monkeypatch.setattr(batches, "CONTEXT_ROWS", rows)
        maker = BatchMaker(TINY, torch.arange(96), device=torch.device("cpu"), tile=3)
        step = maker.cut(sequences, [torch.arange(5, 69, 9), torch.arange(4, 19)], 4)
        assert len(step.context) == (68 + 18 if rows == 1 else 128 + 64)
        model = make_model(TINY).requires_grad_(True)
        train_step(model, frozen, step, LossWeights(ce=0.1, tv=0.9), alpha_conf=1.0)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, exact in gradients[0].items():
        size = exact.abs().amax().clamp(min=1e-30)
        assert_near(gradients[1][name] / size, exact / size, TERMS)
