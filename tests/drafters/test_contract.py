"""Every drafter of the registry keeps the contract of `drafters/base.py`."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from scenes import pages as some_pages
from tiny_drafters import (
    CONFIGS,
    FEW_DIFFUSION,
    GAMMA,
    PATHS,
    assert_same_draft,
    check_draws_are_unseen,
    make_diffusion,
    make_model,
    make_registered,
    row_of,
)
from tiny_eagle import save_eagle
from tiny_mtp import save_mtp

from outrider.drafters import registry
from outrider.drafters.base import DraftBatch, Drafter, Features, Prefilled
from outrider.drafters.block.checkpoint import save_compact

LENGTHS = (9, 20, 1)
CONTEXT, SLOTS, VOCABULARY, WIDTH = 32, 128, 96, 32
TEXTS = [torch.tensor([3, 5, 7, 11] * (CONTEXT // 4)) + row for row in range(len(LENGTHS))]
"""Repetitive texts, so that prompt lookup finds matches."""
pages = partial(some_pages, len(LENGTHS), CONTEXT, slots=SLOTS)


def hidden_of(drafter: Drafter, row: int, length: int) -> torch.Tensor | None:
    layers = 1 if drafter.reads_output else len(drafter.target_layers)
    if not layers:
        return None
    return torch.randn(length, layers * WIDTH, generator=torch.Generator().manual_seed(row))


def read(drafter: Drafter, table: torch.Tensor) -> None:
    """Observe all texts except their anchors."""
    for row, length in enumerate(LENGTHS):
        slots = table[row, :length].long()
        drafter.observe(Features(hidden_of(drafter, row, length), TEXTS[row][:length], torch.arange(length), slots))
        drafter.prefilled(Prefilled(table, torch.tensor([row]), torch.tensor([length]), [length], length))


def asked(table: torch.Tensor, temperature: float) -> DraftBatch:
    generator = torch.Generator().manual_seed(1)
    return DraftBatch(
        anchors=torch.stack([text[length] for text, length in zip(TEXTS, LENGTHS, strict=True)]),
        seq_lens=torch.tensor(LENGTHS),
        page_table=table,
        rows=torch.arange(len(LENGTHS)),
        temperatures=torch.full((len(LENGTHS),), temperature),
        keys=torch.randint(2**62, (len(LENGTHS), GAMMA), generator=generator),
    )


@pytest.fixture(params=[*registry.DRAFTERS])
def drafter(request: pytest.FixtureRequest, tmp_path: Path) -> Drafter:
    made, _ = make_registered(request.param, tmp_path)
    made.allocate(SLOTS)
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_shapes_and_ranges(drafter: Drafter, temperature: float) -> None:
    read(drafter, table := pages(seed=0))
    draft = drafter.propose(asked(table, temperature))
    assert draft.tokens.shape == draft.confidence.shape == (len(LENGTHS), GAMMA)
    assert draft.tokens.dtype == draft.lens.dtype == torch.int64
    assert draft.confidence.dtype == torch.float32
    assert ((draft.tokens >= 0) & (draft.tokens < VOCABULARY)).all()
    assert ((draft.lens >= 0) & (draft.lens <= GAMMA)).all()
    assert draft.lens.any(), "these texts repeat themselves: draft for one of them"
    assert ((draft.confidence >= 0) & (draft.confidence <= 1)).all()
    if draft.probs is not None:
        longest, columns = draft.probs.shape[1:]
        assert draft.lens.max() <= longest <= GAMMA
        assert columns == (VOCABULARY if draft.vocab is None else len(draft.vocab))
        torch.testing.assert_close(draft.probs.sum(-1), torch.ones(len(LENGTHS), longest))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_keys_are_the_only_randomness(drafter: Drafter, temperature: float) -> None:
    read(drafter, table := pages(seed=0))
    drafts = []
    for seed in range(2):
        torch.manual_seed(seed)
        drafts.append(drafter.propose(asked(table, temperature)))
    assert_same_draft(*drafts)


@pytest.mark.parametrize("temperature", [0.0, 6.0])
def test_a_confidence_knows_neither_its_token_nor_later_ones(drafter: Drafter, temperature: float) -> None:
    read(drafter, table := pages(seed=0))
    check_draws_are_unseen(drafter, asked(table, temperature))


def test_state_lies_at_the_slots(drafter: Drafter) -> None:
    """Neither other slots and page-table rows nor writes elsewhere matter."""
    read(drafter, table := pages(seed=0))
    first = drafter.propose(asked(table, 1.0))
    free = torch.tensor(sorted({*range(SLOTS)} - {*table.flatten().tolist()}))
    hidden = hidden_of(drafter, 9, len(free))
    drafter.observe(Features(hidden, torch.full_like(free, 50), torch.arange(len(free)), free))
    assert_same_draft(first, drafter.propose(asked(table, 1.0)))
    read(drafter, moved := pages(seed=1).flip(0))
    assert_same_draft(first, drafter.propose(asked(moved, 1.0)))


@pytest.mark.parametrize("name", registry.DRAFTERS)
def test_the_state_of_slots_suffices_for_another_server(name: str, tmp_path: Path) -> None:
    made = []
    for folder in ("reader", "writer"):
        torch.manual_seed(0)
        made.append(make_registered(name, tmp_path / folder, lookup_gamma=GAMMA, deferred=False)[0])
        made[-1].allocate(SLOTS)
    reader, writer = made
    read(reader, table := pages(seed=0))
    moved = pages(seed=1)
    for theirs, ours in zip(reader.slot_state(), writer.slot_state(), strict=True):
        assert theirs.shape[0] == SLOTS
        ours[moved.flatten().long()] = theirs[table.flatten().long()]
    assert_same_draft(reader.propose(asked(table, 1.0)), writer.propose(asked(moved, 1.0)))


def test_requests_are_drafted_each_by_itself(drafter: Drafter) -> None:
    read(drafter, table := pages(seed=0))
    batch = asked(table, 1.0)
    together = drafter.propose(batch)
    for row in range(len(LENGTHS)):
        alone = drafter.propose(batch.select(torch.tensor([row])))
        assert_same_draft(row_of(together, row), alone)


@pytest.mark.parametrize("name", [name for name, entry in registry.DRAFTERS.items() if entry.needs_checkpoint])
def test_weights_are_exchanged_while_it_serves(name: str, tmp_path: Path) -> None:
    """Mismatched weights are not applied, and draft state stays."""
    folders = [tmp_path / "one", tmp_path / "other"]
    made = []
    for seed, folder in enumerate(folders):
        torch.manual_seed(0)
        made.append(make_registered(name, folder, seed=seed)[0])
    exchanged, wanted = made
    exchanged.reload(str(folders[1]))  # without any state yet, as in a starting server
    exchanged.reload(str(folders[0]))
    for each in made:
        each.allocate(SLOTS)
        read(each, table := pages(seed=0))
    expected = wanted.propose(asked(table, 1.0))
    assert not torch.equal(exchanged.propose(asked(table, 1.0)).tokens, expected.tokens)

    exchanged.reload(str(folders[1]))
    assert exchanged.propose(asked(table, 1.0)).lens.tolist() == expected.lens.tolist()
    read(exchanged, table)
    assert_same_draft(expected, exchanged.propose(asked(table, 1.0)))

    wide = tmp_path / "wide"
    if name == "eagle3":
        save_eagle(wide, norm_output=True)
    elif name == "mtp":
        save_mtp(wide, "qwen3.5")
    else:
        shape = dataclasses.replace((CONFIGS | PATHS).get(name, FEW_DIFFUSION), num_layers=1)
        save_compact(make_diffusion(shape) if shape.kind == "diffusion" else make_model(shape), wide)
    for folder, message in ((wide, "another shape"), (tmp_path / "none", "has no config.json")):
        with pytest.raises(ValueError, match=message):
            exchanged.reload(str(folder))
    assert_same_draft(expected, exchanged.propose(asked(table, 1.0)))
