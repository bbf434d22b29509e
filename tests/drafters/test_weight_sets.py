"""Requests drafted with different sets of weights in one batch, each as by a drafter with this set alone."""

import dataclasses
from pathlib import Path

import pytest
import torch
from margins import assert_near
from scenes import SLOTS, pages
from tiny_drafters import (
    DFLASH,
    GAMMA,
    TERMS,
    TINY,
    TRUNCATED,
    assert_same_draft,
    batch,
    make_drafter,
    make_model,
    make_registered,
)

from outrider.drafters import registry
from outrider.drafters.base import Draft, DraftBatch, Drafter, Features
from outrider.drafters.block import checkpoint
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.config_file import CheckpointError
from outrider.drafters.weight_sets import WeightSets
from outrider.drafters.wrappers import DeferredObserve

LENGTHS = [9, 30, 1, 17, 12]
SETS = [1, 0, 2, 1, 7]
"""For each request; set 7 does not exist."""
CONFIGS = {"dspark": TINY, "truncated": TRUNCATED, "dflash": DFLASH}


def observe(drafter: Drafter, table: torch.Tensor, rows: list[int], sets: list[int] | None = None) -> None:
    hidden = [torch.randn(n, len(drafter.target_layers) * 32, generator=torch.Generator().manual_seed(n)) for n in
              (LENGTHS[row] for row in rows)]  # fmt: skip
    positions = torch.cat([torch.arange(LENGTHS[row]) for row in rows])
    slots = torch.cat([table[row, : LENGTHS[row]].long() for row in rows])
    each = None if sets is None else torch.tensor(sets).repeat_interleave(torch.tensor([LENGTHS[r] for r in rows]))
    drafter.observe(Features(torch.cat(hidden), torch.zeros_like(positions), positions, slots, each))


def asked(table: torch.Tensor, rows: list[int], temperature: float) -> DraftBatch:
    made = batch(table, rows, [LENGTHS[row] for row in rows], temperature)
    if temperature:
        made.temperatures[rows.index(0) if 0 in rows else 0] = 0.0
    return made


def whole(draft: Draft) -> torch.Tensor | None:
    if draft.probs is None or draft.vocab is None:
        return draft.probs
    q = draft.probs.new_zeros(*draft.probs.shape[:2], 96)
    q[:, :, draft.vocab] = draft.probs
    return q


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> BlockConfig:
    return CONFIGS[request.param]


@pytest.fixture
def folders(config: BlockConfig, tmp_path: Path) -> list[str]:
    """Checkpoints of three sets; truncated draft vocabularies differ."""
    for number in range(3):
        checkpoint.save_compact(make_model(config, seed=number), tmp_path / str(number))
    return [str(tmp_path / str(number)) for number in range(3)]


def several(config: BlockConfig, folders: list[str]) -> WeightSets:
    drafter = WeightSets(make_drafter(config, slots=SLOTS))
    for number, folder in enumerate(folders):
        drafter.reload(folder, number)
    return drafter


def alone(drafter: WeightSets, folder: str) -> BlockDrafter:
    start = drafter.model
    assert isinstance(start, BlockDrafter)
    model = checkpoint.load(folder, dtype=torch.float32)
    made = BlockDrafter(model, embedding=start.embedding, head=start._target_head)
    made.allocate(SLOTS)
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_request_is_drafted_by_its_own_set(config: BlockConfig, folders: list[str], temperature: float) -> None:
    drafter, table, rows = several(config, folders), pages(len(LENGTHS)), list(range(len(LENGTHS)))
    observe(drafter, table, rows, SETS)
    batched = dataclasses.replace(asked(table, rows, temperature), sets=torch.tensor(SETS))
    joint = drafter.propose(batched)
    assert joint.drafting == len(rows)
    distinct = set()
    for number in range(3):
        mine = [row for row, own in enumerate(SETS) if (own if own < 3 else 0) == number]
        single = alone(drafter, folders[number])
        observe(single, table, rows)
        wanted = single.propose(batched.select(torch.tensor(mine)))
        assert torch.equal(joint.tokens[mine], wanted.tokens)
        assert torch.equal(joint.lens[mine], wanted.lens)
        assert_near(joint.confidence[mine], wanted.confidence, TERMS)
        if temperature and (q := whole(joint)) is not None and (own := whole(wanted)) is not None:
            sampled = batched.temperatures[mine] > 0
            assert_near(q[mine][sampled], own[sampled], TERMS)
            assert (q[mine][sampled].gather(2, wanted.tokens[sampled][:, :, None]) > 0).all()
        distinct.add(tuple(single.propose(batched).tokens.flatten().tolist()))
    assert len(distinct) == 3  # otherwise any set would do
    if temperature:
        assert joint.probs is not None
    if joint.vocab is not None:
        assert (joint.vocab.diff() > 0).all()


def test_a_draft_does_not_depend_on_other_requests(config: BlockConfig, folders: list[str]) -> None:
    """Other texts, sets and numbers of requests give the same bits."""
    table = pages(len(LENGTHS))
    seen = []
    for others in ([], [1], [1, 2, 3]):
        drafter = several(config, folders)
        rows = [0, *others]
        sets = [1, *(2 for _ in others)]
        observe(drafter, table, rows, sets)
        draft = drafter.propose(dataclasses.replace(asked(table, rows, 1.0), sets=torch.tensor(sets)))
        seen.append((draft.tokens[0], draft.confidence[0]))
    for tokens, confidence in seen[1:]:
        assert torch.equal(tokens, seen[0][0])
        assert torch.equal(confidence, seen[0][1])


def test_only_selected_requests_are_drafted(config: BlockConfig, folders: list[str]) -> None:
    drafter, table, rows = several(config, folders), pages(len(LENGTHS)), list(range(len(LENGTHS)))
    observe(drafter, table, rows, SETS)
    everyone = dataclasses.replace(asked(table, rows, 1.0), sets=torch.tensor(SETS))
    mask = torch.tensor([True, False, True, False, True])
    some, all_of_them = drafter.propose(dataclasses.replace(everyone, draft_mask=mask)), drafter.propose(everyone)
    assert some.lens.tolist() == [TINY.gamma * each for each in mask.tolist()]
    assert torch.equal(some.tokens[mask], all_of_them.tokens[mask])
    nobody = drafter.propose(dataclasses.replace(everyone, draft_mask=torch.zeros_like(mask)))
    assert not nobody.lens.any()


def test_a_dropped_or_exchanged_set(config: BlockConfig, folders: list[str], tmp_path: Path) -> None:
    drafter, table = several(config, folders), pages(len(LENGTHS))
    observe(drafter, table, [0])
    one, none = (dataclasses.replace(asked(table, [0], 0.0), sets=torch.tensor([n])) for n in (1, 0))
    before, start = drafter.propose(one), drafter.propose(none)
    assert not torch.equal(before.tokens, start.tokens)
    drafter.reload(folders[2], 1)
    assert not torch.equal(drafter.propose(one).tokens, before.tokens)
    drafter.drop(1)
    drafter.drop(1)
    assert torch.equal(drafter.propose(one).tokens, start.tokens)
    checkpoint.save_compact(make_model(dataclasses.replace(config, gamma=config.gamma - 1)), tmp_path / "other")
    with pytest.raises(CheckpointError, match="another shape"):
        drafter.reload(str(tmp_path / "other"), 1)


def test_deferred_tokens_go_to_their_set(folders: list[str], config: BlockConfig) -> None:
    table, rows = pages(len(LENGTHS)), list(range(len(LENGTHS)))
    drafts = []
    for wrap in (lambda drafter: drafter, DeferredObserve):
        drafter: Drafter = wrap(several(config, folders))
        observe(drafter, table, rows[:2], SETS[:2])
        observe(drafter, table, rows[2:], SETS[2:])
        drafts.append(drafter.propose(dataclasses.replace(asked(table, rows, 0.0), sets=torch.tensor(SETS))))
    assert_same_draft(*drafts)


def test_the_registry_makes_it(tmp_path: Path) -> None:
    made, _ = make_registered("dspark", tmp_path, lookup_gamma=5, several_sets=True)
    made.allocate(SLOTS)
    made.reload(str(tmp_path), 3)
    table = pages(len(LENGTHS))
    observe(made, table, [0, 1], [3, 0])
    draft = made.propose(dataclasses.replace(asked(table, [0, 1], 1.0), sets=torch.tensor([3, 0])))
    assert draft.tokens.shape == (2, 5)
    made.drop(3)
    with pytest.raises(ValueError, match="deer does not"):
        make_registered("deer", tmp_path / "deer", several_sets=True)
    assert registry.find("dspark").needs_hidden_states
    assert GAMMA < 5
