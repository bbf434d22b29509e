"""Sequence initialisation: each answer's length decides whether the model drafts."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_drafters import DIFFUSION, WIDE, assert_same_draft, make_diffusion, make_drafter, make_target, row_of

from outrider.drafters import registry
from outrider.drafters.base import DraftBatch, Drafter, Features
from outrider.drafters.block.checkpoint import save_compact
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.wrappers import Initialised

LENGTHS = (9, 30, 20)
ANSWERED = [15, 16, 1]


def diffusion(folder: Path, **options: int) -> Drafter:
    save_compact(make_diffusion(DIFFUSION), folder)
    config = SimpleNamespace(model_type="llama", hidden_size=32, num_hidden_layers=6, vocab_size=96)
    target = make_target(config, torch.randn(96, 32, generator=torch.Generator().manual_seed(2)))
    return registry.make("specdiff", target, gamma=4, checkpoint=str(folder), **options)


def batch(drafter: Drafter, *, temperature: float = 1.0) -> DraftBatch:
    """Three requests with observed texts, the second repetitive."""
    drafter.allocate(1024)
    table = torch.arange(3 * 48).view(3, 48).int()
    for row, length in enumerate(LENGTHS):
        ids = torch.randint(96, (length,), generator=torch.Generator().manual_seed(row))
        if row == 1:
            ids = torch.tensor([5, 7, 9]).repeat(length)[:length]
        slots = table[row, :length].long()
        hidden = torch.randn(length, 3 * 64, generator=torch.Generator().manual_seed(row))
        drafter.observe(Features(hidden if drafter.target_layers else None, ids, torch.arange(length), slots))
    return DraftBatch(
        anchors=torch.tensor([3, 5, 4]), seq_lens=torch.tensor(LENGTHS), page_table=table, rows=torch.arange(3),
        temperatures=torch.full((3,), temperature),
        keys=torch.randint(2**62, (3, drafter.gamma), generator=torch.Generator().manual_seed(1)),
        answer_lens=torch.tensor(ANSWERED),
    )  # fmt: skip


def test_answers_that_are_long_enough_get_the_models_drafts(tmp_path: Path) -> None:
    plain, made = diffusion(tmp_path), diffusion(tmp_path, initial_tokens=16)
    everyone, draft = plain.propose(batch(plain)), made.propose(batch(made))
    assert (draft.drafting, draft.lens.tolist()) == (1, [0, 4, 0])
    assert_same_draft(row_of(draft, 1), row_of(everyone, 1))
    asking = batch(made)
    assert made.propose(dataclasses.replace(asking, draft_mask=torch.tensor([True, False, True]))).drafting == 0
    with pytest.raises(ValueError, match="how long the answers are"):
        made.propose(dataclasses.replace(asking, answer_lens=None))


def test_shorter_ones_are_left_to_prompt_lookup(tmp_path: Path) -> None:
    made = diffusion(tmp_path, initial_tokens=17, lookup_gamma=6)
    assert isinstance(made, LookupFirst)
    draft = made.propose(batch(made))
    assert (draft.drafting, draft.lens.tolist()) == (0, [0, 6, 0])
    assert draft.tokens[1].tolist() == [7, 9, 5, 7, 9, 5]
    begun = diffusion(tmp_path, initial_tokens=15, lookup_gamma=6)
    assert begun.propose(batch(begun)).lens.tolist()[0] == 4


def test_a_block_drafter_can_be_initialised_as_well() -> None:
    plain = make_drafter(WIDE, slots=1024)
    made = Initialised(plain, 16)
    asking = dataclasses.replace(batch(plain), keys=torch.ones(3, plain.gamma, dtype=torch.int64))
    assert made.target_layers == plain.target_layers
    everyone, draft = plain.propose(asking), made.propose(asking)
    assert draft.lens.tolist() == [0, plain.gamma, 0]
    assert torch.equal(draft.tokens[1], everyone.tokens[1])
