"""BlockDrafter equals the training forward and keeps the drafter contract."""

import dataclasses
from pathlib import Path

import pytest
import torch
from margins import assert_near
from tiny_drafters import (
    CONFIGS,
    TERMS,
    TINY,
    assert_same_draft,
    batch,
    check_draws_are_unseen,
    check_tokens_follow_q,
    make_drafter,
    make_model,
    row_of,
)

from outrider.drafters.base import Features
from outrider.drafters.block import checkpoint
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.block.heads import GREEDY, SAMPLED
from outrider.drafters.config_file import CheckpointError
from outrider.drafters.training.batches import BatchMaker
from outrider.drafters.training.forward import FrozenTarget
from outrider.drafters.training.store import Sequence
from outrider.drafters.training.validate import drafted

LENGTHS = (9, 30, 1)


def page_table(rows: int = 4, context: int = 48, slots: int = 256, seed: int = 5) -> torch.Tensor:
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(seed))
    return order[: rows * context].view(rows, context).to(torch.int32)


def features(config: BlockConfig, length: int, seed: int) -> torch.Tensor:
    width = len(config.target_layers) * config.hidden_size
    return torch.randn(length, width, generator=torch.Generator().manual_seed(seed))


def observe(drafter: BlockDrafter, table: torch.Tensor, row: int, hidden: torch.Tensor, start: int, stop: int) -> None:
    positions = torch.arange(start, stop)
    slots = table[row, start:stop].long()
    drafter.observe(Features(hidden[start:stop], torch.zeros_like(positions), positions, slots))


def prepared(config: BlockConfig) -> tuple[BlockDrafter, torch.Tensor]:
    drafter, table = make_drafter(config), page_table()
    for row, length in enumerate(LENGTHS):
        observe(drafter, table, row, features(config, length, row), 0, length)
    return drafter, table


def test_drafts_equal_the_training_forward(config: BlockConfig) -> None:
    drafter, table = prepared(config)
    draft = drafter.propose(batch(table, [0, 1, 2], list(LENGTHS)))
    maker = BatchMaker(config, drafter.model.vocab, device=torch.device("cpu"))
    frozen = FrozenTarget(drafter.embedding, drafter.head)
    for row, length in enumerate(LENGTHS):
        tokens = torch.zeros(length + config.gamma + 1, dtype=torch.int64)
        tokens[length] = 3 + row
        none = torch.zeros(config.gamma + 1, 2)
        hidden = features(config, length, row)
        whole = torch.cat([hidden, hidden.new_zeros(config.gamma + 1, hidden.shape[1])])
        sequence = Sequence(tokens, length, whole, none.long(), none)
        step = maker.cut([sequence], [torch.tensor([length])], config.gamma)
        assert torch.equal(draft.tokens[row], drafted(drafter.model, frozen, step)[0][0])


def test_weights_exchanged_while_it_serves(config: BlockConfig, tmp_path: Path) -> None:
    """The new draft vocabulary has the same size."""
    drafter, table = prepared(config)
    steps = batch(table, [0, 1, 2], list(LENGTHS))
    before = drafter.propose(steps)
    other = make_model(config, seed=7)
    checkpoint.save_compact(other, tmp_path / "other")
    drafter.reload(str(tmp_path / "other"))
    loaded = checkpoint.load(tmp_path / "other", dtype=torch.float32)
    fresh = BlockDrafter(loaded, embedding=drafter.embedding, head=drafter._target_head)
    fresh.allocate(256)
    for each in (drafter, fresh):
        for row, length in enumerate(LENGTHS):
            observe(each, table, row, features(config, length, row), 0, length)
    after, wanted = drafter.propose(steps), fresh.propose(steps)
    assert torch.equal(after.tokens, wanted.tokens)
    assert torch.equal(after.confidence, wanted.confidence)
    assert not torch.equal(after.tokens, before.tokens)


def test_weights_of_another_shape_are_refused(config: BlockConfig, tmp_path: Path) -> None:
    drafter, table = prepared(config)
    steps = batch(table, [0, 1, 2], list(LENGTHS))
    before = drafter.propose(steps)
    checkpoint.save_compact(make_model(dataclasses.replace(config, gamma=config.gamma - 1)), tmp_path / "other")
    with pytest.raises(CheckpointError, match="another shape"):
        drafter.reload(str(tmp_path / "other"))
    assert torch.equal(drafter.propose(steps).tokens, before.tokens)


def test_state_of_chunks_equals_state_of_one_pass(config: BlockConfig) -> None:
    once, table = prepared(config)
    chunked = make_drafter(config)
    for row, length in enumerate(LENGTHS):
        hidden = features(config, length, row)
        for start in range(0, length, 4):
            stop = min(start + 4, length)
            observe(chunked, table, row, hidden, start, stop)
            chunked.propose(batch(table, [row], [stop]))
    for row, length in enumerate(LENGTHS):
        slots = table[row, :length].long()
        for one, other in zip(once.pools, chunked.pools, strict=True):
            for a, b in zip(one, other, strict=True):
                assert_near(a[slots], b[slots], TERMS)


def test_block_state_is_replaced_by_features(config: BlockConfig) -> None:
    """It must also hold after a step that verified no draft."""
    drafter, table = prepared(config)
    hidden = torch.cat([features(config, 9, 0), features(config, 6, 77)])
    for length in (9, 10, 14):
        drafter.propose(batch(table, [0], [length]))
        observe(drafter, table, 0, hidden, length, min(length + (1 if length == 9 else 4), 15))
    fresh = make_drafter(config)
    observe(fresh, table, 0, hidden, 0, 15)
    left, right = (d.propose(batch(table, [0], [15])) for d in (drafter, fresh))
    assert_same_draft(left, right)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_batch_equals_singles(config: BlockConfig, temperature: float) -> None:
    drafter, table = prepared(config)
    together = drafter.propose(batch(table, [2, 0, 1], [1, 9, 30], temperature))
    for i, (row, length) in enumerate([(2, 1), (0, 9), (1, 30)]):
        alone = drafter.propose(batch(table, [row], [length], temperature))
        assert_same_draft(row_of(together, i), alone)


def test_shared_prefix_needs_no_second_observe() -> None:
    drafter, table = prepared(TINY)
    table[3, :9] = table[0, :9]
    one, other = drafter.propose(batch(table, [0], [9])), batch(table, [3], [9])
    other = dataclasses.replace(other, anchors=torch.tensor([3]))
    assert torch.equal(one.tokens, drafter.propose(other).tokens)


def test_draft_honours_the_contract(config: BlockConfig) -> None:
    drafter, table = prepared(config)
    draft = drafter.propose(batch(table, [0, 1], [9, 30], 1.0))
    assert draft.tokens.shape == draft.confidence.shape == (2, config.gamma)
    assert draft.lens.tolist() == [config.gamma] * 2
    assert draft.probs.shape == (2, config.gamma, config.logit_size)
    torch.testing.assert_close(draft.probs.sum(-1), torch.ones(2, config.gamma))
    assert ((draft.confidence > 0) & (draft.confidence < 1)).all()
    if config.draft_vocab_size:
        assert (draft.vocab.diff() > 0).all()
        assert torch.isin(draft.tokens, draft.vocab).all()
    else:
        assert draft.vocab is None
    assert drafter.propose(batch(table, [0], [9])).probs is None


def test_confidence_is_of_the_head_and_of_how_sure_the_draft_is() -> None:
    drafter, table = prepared(CONFIGS["dspark"])
    step = dataclasses.replace(batch(table, [0, 1, 2], list(LENGTHS), 6.0), temperatures=torch.tensor([6.0, 0.0, 0.7]))
    head = drafter.model.confidence_head
    with torch.no_grad():
        head.proj.weight.zero_()
        head.proj.bias.fill_(1.5)
    draft = drafter.propose(dataclasses.replace(step, all_greedy=False))
    own = torch.logit(draft.probs.amax(-1))
    for row, (of_head, of_draft, constant) in enumerate((SAMPLED, GREEDY, SAMPLED)):
        wanted = torch.sigmoid(of_head * 1.5 + of_draft * own[row] + constant)
        torch.testing.assert_close(draft.confidence[row], wanted)


@pytest.mark.parametrize("kind", ["dspark", "rnn", "dflash", "wide", "wide dflash"])
def test_confidence_does_not_see_its_own_token(kind: str) -> None:
    check_draws_are_unseen(*prepared(CONFIGS[kind]), LENGTHS)


@pytest.mark.parametrize("kind", ["truncated", "wide"])
def test_tokens_follow_q_exactly(kind: str) -> None:
    check_tokens_follow_q(*prepared(CONFIGS[kind]), positions=range(4), draws=4000)


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


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_of_fewer_tokens_equals_a_smaller_blocks(config: BlockConfig, temperature: float) -> None:
    (drafter, table), (smaller, _) = prepared(config), prepared(config)
    smaller.gamma = 2
    asking = batch(table, [2, 0, 1], [1, 9, 30], temperature)
    draft = drafter.propose(dataclasses.replace(asking, depth=2, draft_mask=torch.tensor([True, True, False])))
    wanted = smaller.propose(dataclasses.replace(asking, draft_mask=torch.tensor([True, True, False])))
    assert draft.tokens.shape == draft.confidence.shape == (3, config.gamma)
    assert draft.lens.tolist() == [2, 2, 0]
    assert torch.equal(draft.tokens[:2, :2], wanted.tokens[:2])
    assert torch.equal(draft.confidence[:2, :2], wanted.confidence[:2])
    assert not draft.confidence[:, 2:].any()
    if temperature:
        assert torch.equal(draft.probs, wanted.probs)
    deeper = drafter.propose(dataclasses.replace(asking, depth=config.gamma + 3))
    assert deeper.lens.tolist() == [config.gamma] * 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_unselected_requests_get_no_draft(config: BlockConfig, temperature: float) -> None:
    drafter, table = prepared(config)
    asking = batch(table, [2, 0, 1], [1, 9, 30], temperature)
    everyone = drafter.propose(asking)
    some = drafter.propose(dataclasses.replace(asking, draft_mask=torch.tensor([True, False, True])))
    assert (everyone.drafting, some.drafting) == (3, 2)
    assert some.lens.tolist() == [config.gamma, 0, config.gamma]
    for row in (0, 2):
        assert_same_draft(row_of(some, row), row_of(everyone, row))
    assert not some.confidence[1].any()
    nobody = drafter.propose(dataclasses.replace(asking, draft_mask=torch.zeros(3, dtype=torch.bool)))
    assert (nobody.drafting, nobody.lens.tolist()) == (0, [0, 0, 0])
