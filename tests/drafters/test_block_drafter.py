"""BlockDrafter equals the training forward and keeps the drafter contract."""

import dataclasses
from pathlib import Path

import pytest
import torch
from scenes import BLOCKS, LENGTHS, SLOTS, Scene, drafted_steps
from tiny_drafters import CONFIGS, TINY, batch, make_model

from outrider.drafters.base import Features
from outrider.drafters.block import checkpoint
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.block.heads import GREEDY, SAMPLED
from outrider.drafters.config_file import CheckpointError
from outrider.drafters.training.forward import FrozenTarget
from outrider.drafters.training.validate import drafted


def test_drafts_equal_the_training_forward(config: BlockConfig) -> None:
    drafter, tokens, _, step = drafted_steps(config, 0.0)
    assert torch.equal(tokens, drafted(drafter.model, FrozenTarget(drafter.embedding, drafter.head), step)[0])


@pytest.mark.parametrize("config", [BLOCKS[name] for name in ("truncated", "wide", "wide dflash2", "lilicorr")])
def test_weights_exchanged_while_it_serves(config: BlockConfig, tmp_path: Path) -> None:
    """The new draft vocabulary has the same size."""
    scene = Scene.of_block(config)
    drafter, table = scene.observed()
    steps = batch(table, [0, 1, 2], list(LENGTHS))
    before = drafter.propose(steps)
    newer = make_model(config, seed=7)
    checkpoint.save_compact(newer, tmp_path / "other")
    drafter.reload(str(tmp_path / "other"))
    loaded = checkpoint.load(tmp_path / "other", dtype=torch.float32)
    fresh = BlockDrafter(loaded, embedding=drafter.embedding, head=drafter._target_head)
    fresh.allocate(SLOTS)
    for each in (drafter, fresh):
        for row, length in enumerate(LENGTHS):
            scene.observe(each, table, row, 0, length)
    after, wanted = drafter.propose(steps), fresh.propose(steps)
    assert torch.equal(after.tokens, wanted.tokens)
    assert torch.equal(after.confidence, wanted.confidence)
    assert not torch.equal(after.tokens, before.tokens)


def test_confidence_is_of_the_head_and_of_how_sure_the_draft_is() -> None:
    drafter, table = Scene.of_block(CONFIGS["dspark"]).observed()
    step = dataclasses.replace(batch(table, [0, 1, 2], list(LENGTHS), 6.0), temperatures=torch.tensor([6.0, 0.0, 0.7]))
    head = drafter.model.confidence_head
    with torch.no_grad():
        head.proj.weight.zero_()
        head.proj.bias.fill_(1.5)
    draft = drafter.propose(dataclasses.replace(step, all_greedy=False))
    sureness = torch.logit(draft.probs.amax(-1))
    for row, (of_head, of_draft, constant) in enumerate((SAMPLED, GREEDY, SAMPLED)):
        wanted = torch.sigmoid(of_head * 1.5 + of_draft * sureness[row] + constant)
        torch.testing.assert_close(draft.confidence[row], wanted)


def test_smaller_gamma_and_refusals() -> None:
    model = make_model(TINY)
    shared = torch.randn(TINY.vocab_size, TINY.hidden_size)
    assert BlockDrafter(model, embedding=shared, head=shared, gamma=2).gamma == 2
    with pytest.raises(CheckpointError, match=r"1\.\.4.*got 5"):
        BlockDrafter(model, embedding=shared, head=shared, gamma=5)
    with pytest.raises(CheckpointError, match=r"\[96, 32\].*\[96, 16\]"):
        BlockDrafter(model, embedding=shared[:, :16], head=shared)
    drafter = BlockDrafter(model, embedding=shared, head=shared)
    drafter.allocate(8)
    nothing = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"\[1, 3, 4\]"):
        drafter.observe(Features(None, nothing, nothing, nothing))
