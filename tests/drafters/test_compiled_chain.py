"""The compiled chain equals passes of the plain network, and declines unknown models."""

import dataclasses
from pathlib import Path

import pytest
import torch
from instruction_sets import SETS, using
from margins import assert_near
from test_eagle import target_of
from tiny_drafters import TERMS
from tiny_eagle import LAYER_IDS, VOCAB, WIDE, flat, save_eagle

from outrider.drafters.base import Draft, DraftBatch, Features
from outrider.drafters.block import compiled as compiled_block
from outrider.drafters.eagle.drafter import EagleDrafter
from outrider.kernels.blocks import BlockRows, quantise_q8_0
from outrider.kernels.cpu import native
from outrider.kernels.noise import torch_gumbel_argmax

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiled kernels here")

GAMMA = 4
LENGTHS = torch.tensor([70, 1, 23, 17])
"""The first is longer than the heads' trained positions."""
FILTERS = {"top_ks": torch.tensor([1, 5, 2**30, 2**30]), "top_ps": torch.tensor([1.0, 0.8, 0.5, 1.0])}
EACH = pytest.mark.parametrize("layout", WIDE)


def prepared(layout: str, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[EagleDrafter, DraftBatch]:
    """A drafter that has observed four texts, and a batch for their greedy drafts."""
    draw = torch.Generator().manual_seed(1)
    target = target_of(layout)
    weights = tuple(rows.to(dtype) for rows in target.weights())
    target = dataclasses.replace(target, dtype=dtype, weights=lambda: weights)
    made = EagleDrafter.load(target, save_eagle(folder, layout), gamma=GAMMA)
    assert made.compiled is not None
    width = int(LENGTHS.max()) + GAMMA + 1
    table = torch.randperm(len(LENGTHS) * width, generator=draw).int().view(-1, width)
    made.allocate(table.numel())
    rows = torch.tensor([2, 0, 3, 1])
    slots = torch.cat([table[row, :length] for row, length in zip(rows, LENGTHS, strict=True)]).long()
    places = torch.cat([torch.arange(int(length)) for length in LENGTHS])
    hidden = torch.randn(len(slots), len(LAYER_IDS) * flat(layout)["hidden_size"], generator=draw)
    made.observe(Features(hidden.to(dtype), torch.randint(VOCAB, slots.shape, generator=draw), places, slots))
    asked = DraftBatch(
        anchors=torch.tensor([3, 90, 14, 3]), seq_lens=LENGTHS, page_table=table, rows=rows,
        temperatures=torch.zeros(4), keys=torch.randint(2**62, (4, GAMMA), generator=draw),
    )  # fmt: skip
    return made, asked


def both(made: EagleDrafter, asked: DraftBatch) -> tuple[Draft, Draft]:
    compiled = made.compiled
    assert compiled is not None
    ours = made.propose(asked)
    made.compiled = None
    plain = made.propose(asked)
    made.compiled = compiled
    return ours, plain


@EACH
@pytest.mark.parametrize("name", SETS.values())
def test_float32_drafts_equal_the_plain_network(layout: str, name: str, tmp_path: Path) -> None:
    with using(name):
        made, asked = prepared(layout, tmp_path)
        for heat, rules in (([0.0] * 4, {}), ([0.0, 0.7, 1.0, 1.3], {}), ([0.0, 0.7, 1.0, 1.3], FILTERS)):
            case = dataclasses.replace(asked, temperatures=torch.tensor(heat), **rules)
            ours, plain = both(made, case)
            assert torch.equal(ours.tokens, plain.tokens)
            assert torch.equal(ours.lens, plain.lens)
            assert_near(ours.confidence, plain.confidence, TERMS)
            if max(heat) == 0:
                assert ours.probs is None is plain.probs
                continue
            assert ours.probs is not None
            assert plain.probs is not None
            assert_near(ours.probs[1:], plain.probs[1:], TERMS)
            assert not rules or ((ours.probs[1] > 0).sum(-1) <= 5).all()
            assert (ours.vocab is None) == (plain.vocab is None) == (layout == "wide whole")
            unasked, _ = both(made, dataclasses.replace(case, wants_probs=False))
            assert unasked.probs is None
            assert torch.equal(unasked.tokens, ours.tokens)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SETS.values())
def test_a_draft_does_not_depend_on_its_batch(layout: str, dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    with using(name):
        made, asked = prepared(layout, tmp_path, dtype)
        asked = dataclasses.replace(asked, temperatures=torch.tensor([0.5, 0.7, 1.0, 1.3]))
        together = made.propose(asked)
        assert together.probs is not None
        for row in range(4):
            alone = made.propose(asked.select(torch.tensor([row])))
            assert alone.probs is not None
            for one, all_of_them in ((alone.tokens, together.tokens), (alone.probs, together.probs)):
                assert torch.equal(one[0], all_of_them[row])
            assert torch.equal(alone.confidence[0], together.confidence[row])


@EACH
@pytest.mark.parametrize("sets", [(), compiled_block.MULTIPLIES_BYTES], ids=["blocks", "bytes"])
def test_bfloat16_drafts_are_near_the_plain_network(
    layout: str, sets: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_block, "MULTIPLIES_BYTES", sets)
    made, asked = prepared(layout, tmp_path, torch.bfloat16)
    ours, plain = both(made, dataclasses.replace(asked, temperatures=torch.tensor([0.0, 1.0, 1.0, 1.3])))
    assert ours.probs is not None
    assert plain.probs is not None
    distance = (ours.probs[1:, 0] - plain.probs[1:, 0]).abs().sum(-1) / 2  # later ones depend on the draws
    assert distance.max() < 0.05
    assert (ours.confidence[:, 0] - plain.confidence[:, 0]).abs().max() < 0.05


def test_fewer_tokens_are_the_first_of_more(tmp_path: Path) -> None:
    made, asked = prepared("wide", tmp_path)
    whole, part = made.propose(asked), made.propose(dataclasses.replace(asked, depth=2))
    assert part.tokens.shape == whole.tokens.shape
    assert part.lens.tolist() == [2] * 4
    assert torch.equal(part.tokens[:, :2], whole.tokens[:, :2])
    assert torch.equal(part.confidence[:, :2], whole.confidence[:, :2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_decide_the_draws(dtype: torch.dtype, tmp_path: Path) -> None:
    """Given the earlier tokens, each key draws from q, which is the same for all keys."""
    made, asked = prepared("wide", tmp_path, dtype)
    made.propose(asked)
    count = 400
    for k in range(GAMMA):
        keys = torch.full((count, GAMMA), 37)
        keys[:, k] = torch.arange(count)
        many = dataclasses.replace(
            asked.select(torch.tensor([2]).expand(count)), keys=keys, temperatures=torch.full((count,), 4.0)
        )
        draft = made.propose(many)
        assert draft.probs is not None
        assert draft.vocab is not None
        assert torch.equal(draft.probs[:, k], draft.probs[:1, k].expand(count, -1))  # q is known before the draw
        drawn = torch_gumbel_argmax(draft.probs[:, k], keys[:, k], draft.vocab)
        assert len(set(drawn.tolist())) > 5
        assert torch.equal(draft.tokens[:, k], draft.vocab[drawn])


def test_an_embedding_in_blocks_gives_its_expanded_rows(tmp_path: Path) -> None:
    made, asked = prepared("wide", tmp_path, torch.bfloat16)
    embedding, head = target_of("wide").weights()
    blocks = BlockRows(quantise_q8_0(embedding), "Q8_0", embedding.shape[1])
    drafts = []
    for rows in (blocks, blocks[torch.arange(VOCAB)]):
        made._target_rows = rows, head
        made.reload(str(tmp_path))
        assert made.compiled is not None
        drafts.append(made.propose(asked))
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    assert torch.equal(drafts[0].confidence, drafts[1].confidence)


def test_new_weights_continue_on_the_old_weights_state(tmp_path: Path) -> None:
    made, asked = prepared("wide", tmp_path / "one")
    before = made.propose(asked)
    made.reload(str(save_eagle(tmp_path / "other", "wide", seed=7)))
    ours, plain = both(made, asked)
    assert torch.equal(ours.tokens, plain.tokens)
    assert not torch.equal(ours.tokens, before.tokens)


def test_it_declines_unknown_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = prepared("wide", tmp_path / "wide")
    embedding, head = made._target_rows
    for rows in (embedding.bfloat16(), embedding.T.contiguous().T):  # another type, or strided
        made._target_rows = rows, head
        made.reload(str(tmp_path / "wide"))
        assert made.compiled is None
    narrow = EagleDrafter.load(target_of("authors"), save_eagle(tmp_path / "authors"), gamma=GAMMA)
    assert narrow.compiled is None
    monkeypatch.setattr(native, "available", lambda: False)
    assert EagleDrafter.load(target_of("wide"), tmp_path / "wide", gamma=GAMMA).compiled is None


def test_mismatches_are_explained(tmp_path: Path) -> None:
    made, asked = prepared("wide", tmp_path)
    made.propose(asked)
    short = dataclasses.replace(asked, page_table=asked.page_table[:, : int(LENGTHS.max()) + 2].contiguous())
    with pytest.raises(RuntimeError, match=r"row 2 and positions 72 \.\. 72 are not in the page table \[4, 72\]"):
        made.propose(short)
    with pytest.raises(RuntimeError, match=r"anchors\[0\] is 96, outside 0 \.\. 95"):
        made.propose(dataclasses.replace(asked, anchors=torch.full((4,), 96)))
