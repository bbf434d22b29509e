"""Compiled drafters equal their plain networks, and decline unknown ones."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from instruction_sets import SETS, using
from margins import assert_near
from scenes import GAMMA, VOCAB, eagle_target
from tiny_drafters import (
    DFLASH,
    DFLASH2,
    GATED,
    TERMS,
    TINY,
    WIDE,
    WIDE_DFLASH,
    WIDE_DFLASH2,
    WIDE_LILICORR,
    make_model,
)
from tiny_eagle import LAYER_IDS, flat, save_eagle
from tiny_eagle import WIDE as HEADS

from outrider.drafters.base import Draft, DraftBatch, Features
from outrider.drafters.block import compiled as compiled_block
from outrider.drafters.block.choosing import Convolution
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.block.layers import RowConvolution
from outrider.drafters.eagle.drafter import EagleDrafter
from outrider.kernels.blocks import BlockRows, quantise_q8_0
from outrider.kernels.cpu import native
from outrider.kernels.noise import torch_gumbel_argmax

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiled kernels here")

BLOCKS = {
    "dspark": WIDE,
    "whole vocabulary": dataclasses.replace(WIDE, draft_vocab_size=None),
    "no confidence head": dataclasses.replace(WIDE, confidence_head=False),
    "confidence of the state alone": dataclasses.replace(WIDE, confidence_with_markov=False),
    "not sampled from the anchor": dataclasses.replace(WIDE, sample_from_anchor=False),
    "odd widths": dataclasses.replace(WIDE, intermediate_size=80, draft_vocab_size=37, num_layers=1, num_kv_heads=1),
    "dflash": WIDE_DFLASH,
    "blocks behind the last position": dataclasses.replace(WIDE, max_positions=40),
}
PATHS = {
    "dflash2": WIDE_DFLASH2,
    "lilicorr": WIDE_LILICORR,
    "one tap": dataclasses.replace(WIDE_DFLASH2, num_layers=1, convolution=Convolution(taps=1, group=64)),
    "as many taps as rows": dataclasses.replace(WIDE_DFLASH2, convolution=Convolution(taps=9, group=16)),
    "no convolution": dataclasses.replace(WIDE_DFLASH2, convolution=None),
    "scaled and capped": dataclasses.replace(WIDE_DFLASH2, logit_scale=0.5, logit_cap=5.0),
}
"""Drafters that draw their tokens outside the call."""
CALLS = [*BLOCKS, *HEADS]
"""Drafters with whole drafts in one call."""
FILTERS = {"top_ks": torch.tensor([1, 5, 2**30, 2**30]), "top_ps": torch.tensor([1.0, 0.8, 0.5, 1.0])}
HEAT = torch.tensor([0.0, 0.7, 1.0, 1.3])
EACH_TYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
EACH_SET = pytest.mark.parametrize("instructions", SETS.values())


class Case:
    """Four requests of a drafter. name: of BLOCKS, PATHS or HEADS. asked: their greedy batch."""

    def __init__(self, name: str, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(1)
        self.create: Callable[[], Any]
        if name in HEADS:
            target = eagle_target(name)
            weights = tuple(rows.to(dtype) for rows in target.weights())
            target = dataclasses.replace(target, dtype=dtype, weights=lambda: weights)
            save_eagle(folder, name)
            self.create = lambda: EagleDrafter.load(target, folder, gamma=GAMMA)
            first, width = 70, len(LAYER_IDS) * flat(name)["hidden_size"]  # longer than the heads' trained positions
        else:
            config = (BLOCKS | PATHS)[name]
            model = make_model(config).to(dtype)
            rows = (torch.randn(config.vocab_size, config.hidden_size, generator=draw) * 0.3).to(dtype)
            self.create = lambda: BlockDrafter(model, embedding=rows, head=rows)
            first, width = 40, len(config.target_layers) * config.hidden_size
        lengths, rows_of = torch.tensor([first, 1, 23, 17]), torch.tensor([2, 0, 3, 1])
        table = torch.randperm(4 * (first + GAMMA + 1), generator=draw).int().view(4, -1)
        slots = torch.cat([table[row, :length] for row, length in zip(rows_of, lengths, strict=True)]).long()
        positions = torch.cat([torch.arange(int(length)) for length in lengths])
        hidden = torch.randn(len(slots), width, generator=draw).to(dtype)
        self.shown = Features(hidden, torch.randint(VOCAB, slots.shape, generator=draw), positions, slots)
        self.asked = DraftBatch(
            anchors=torch.tensor([3, 90, 14, 3]), seq_lens=lengths, page_table=table, rows=rows_of,
            temperatures=torch.zeros(4), keys=torch.randint(2**62, (4, GAMMA), generator=draw),
        )  # fmt: skip

    def make(self, *, compiled: bool = True) -> Any:
        """A drafter that has read the texts."""
        made = self.create()
        assert made.compiled is not None
        made.compiled = made.compiled if compiled else None
        made.allocate(self.asked.page_table.numel())
        made.observe(self.shown)
        return made

    def both(self, **changes: Any) -> list[Draft]:
        """The compiled draft and the plain one."""
        asked = dataclasses.replace(self.asked, **changes)
        return [self.make(compiled=compiled).propose(asked) for compiled in (True, False)]


@EACH_SET
@pytest.mark.parametrize("name", [*CALLS, *PATHS])
def test_float32_drafts_equal_the_plain_network(name: str, instructions: str, tmp_path: Path) -> None:
    with using(instructions):
        case = Case(name, tmp_path)
        states = (case.make(compiled=compiled).slot_state() for compiled in (True, False))
        for one, other in zip(*states, strict=True):
            assert_near(one.float(), other.float(), TERMS)
        for heat, rules in ((torch.zeros(4), {}), (HEAT, {}), (HEAT, FILTERS)):
            ours, plain = case.both(temperatures=heat, **rules)
            assert torch.equal(ours.tokens, plain.tokens)
            assert torch.equal(ours.lens, plain.lens)
            assert_near(ours.confidence, plain.confidence, TERMS)
            assert (ours.vocab is None) == (plain.vocab is None)
            if heat is not HEAT:
                assert ours.probs is None is plain.probs
                continue
            assert_near(ours.probs[1:], plain.probs[1:], TERMS)
            assert not rules or ((ours.probs[1] > 0).sum(-1) <= 5).all()
            for unasked in case.both(temperatures=heat, wants_probs=False, **rules):
                assert unasked.probs is None
                assert torch.equal(unasked.tokens, ours.tokens)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("sets", [(), compiled_block.MULTIPLIES_BYTES], ids=["blocks", "bytes"])
def test_bfloat16_drafts_in_eight_bits_are_near_the_plain_network(
    name: str, sets: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_block, "MULTIPLIES_BYTES", sets)
    case = Case(name, tmp_path, torch.bfloat16)
    if name in BLOCKS:
        pools = [torch.stack(case.make(compiled=compiled).slot_state()).float() for compiled in (True, False)]
        assert (pools[0] - pools[1]).norm() / pools[1].norm() < 0.02
    ours, plain = case.both(temperatures=HEAT)
    distance = (ours.probs[1:, 0] - plain.probs[1:, 0]).abs().sum(-1) / 2  # later ones depend on the draws
    assert distance.max() < (0.1 if name in BLOCKS else 0.05)
    assert (ours.confidence[:, 0] - plain.confidence[:, 0]).abs().max() < (0.08 if name in BLOCKS else 0.05)


@EACH_SET
@EACH_TYPE
@pytest.mark.parametrize("name", CALLS)
def test_a_draft_does_not_depend_on_its_batch(name: str, dtype: torch.dtype, instructions: str, tmp_path: Path) -> None:
    with using(instructions):
        case = Case(name, tmp_path, dtype)
        made, asked = case.make(), dataclasses.replace(case.asked, temperatures=HEAT + 0.5)
        together = made.propose(asked)
        for row in range(4):
            alone = made.propose(asked.select(torch.tensor([row])))
            assert torch.equal(alone.tokens[0], together.tokens[row])
            assert torch.equal(alone.probs[0], together.probs[row])
            assert torch.equal(alone.confidence[0], together.confidence[row])


@EACH_TYPE
@pytest.mark.parametrize("name", ["dspark", "wide"])
def test_keys_decide_the_draws(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Given the earlier tokens, each key draws from q, which is the same for all keys."""
    case, count = Case(name, tmp_path, dtype), 400
    made = case.make()
    made.propose(case.asked)
    many = case.asked.select(torch.tensor([2]).expand(count))
    for k in range(GAMMA):
        keys = torch.full((count, GAMMA), 37)
        keys[:, k] = torch.arange(count)
        draft = made.propose(dataclasses.replace(many, keys=keys, temperatures=torch.full((count,), 4.0)))
        assert torch.equal(draft.probs[:, k], draft.probs[:1, k].expand(count, -1))  # q is known before the draw
        drawn = torch_gumbel_argmax(draft.probs[:, k], keys[:, k], draft.vocab)
        assert len(set(drawn.tolist())) > 5
        assert torch.equal(draft.tokens[:, k], draft.vocab[drawn])


def plain_pass(drafter: BlockDrafter, asked: DraftBatch) -> tuple[torch.Tensor, torch.Tensor]:
    with patch.object(drafter, "_draw", return_value=(None, None, None)) as draw:
        drafter._propose(asked)
    logits, hidden, _ = draw.call_args.args
    return logits, hidden


@EACH_SET
@pytest.mark.parametrize("name", PATHS)
def test_states_and_logits_before_a_path_is_drawn(name: str, instructions: str, tmp_path: Path) -> None:
    """They are equal in float32, near in 8 bits, and independent of other requests."""
    with using(instructions):
        for dtype, close in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
            case = Case(name, tmp_path, dtype)
            for convolution in case.create().model.modules():
                if isinstance(convolution, RowConvolution):  # near their initial values, as in training
                    convolution.kernel_projection.weight.mul_(0.2)
                    convolution.base_kernel[:, 0] += 1
            drafter, asked = case.make(), case.asked
            logits, states = drafter.compiled.forward(asked, GAMMA)
            for ours, plain in zip((logits, states), plain_pass(drafter, asked), strict=True):
                assert (ours - plain).float().norm() / plain.float().norm() < close
            for row in range(4):
                alone = drafter.compiled.forward(asked.select(torch.tensor([row])), GAMMA)
                assert torch.equal(alone[0][0], logits[row])
                assert torch.equal(alone[1][0], states[row])


def test_an_embedding_in_blocks_gives_its_expanded_rows(tmp_path: Path) -> None:
    case = Case("wide", tmp_path, torch.bfloat16)
    made, (embedding, head) = case.make(), eagle_target("wide").weights()
    blocks = BlockRows(quantise_q8_0(embedding), "Q8_0", embedding.shape[1])
    drafts = []
    for rows in (blocks, blocks[torch.arange(VOCAB)]):
        made._target_rows = rows, head
        made.reload(str(tmp_path))
        assert made.compiled is not None
        drafts.append(made.propose(case.asked))
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    assert torch.equal(drafts[0].confidence, drafts[1].confidence)


def test_new_weights_continue_on_the_old_weights_state(tmp_path: Path) -> None:
    case = Case("wide", tmp_path / "one")
    other = str(save_eagle(tmp_path / "other", "wide", seed=7))
    drafts = []
    for compiled in (True, False):
        made = case.make()
        before = made.propose(case.asked)
        made.reload(other)
        made.compiled = made.compiled if compiled else None
        drafts.append(made.propose(case.asked))
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    assert not torch.equal(drafts[0].tokens, before.tokens)


def test_a_block_declines_unknown_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(config: BlockConfig) -> bool:
        shared = torch.randn(config.vocab_size, config.hidden_size)
        return BlockDrafter(make_model(config), embedding=shared, head=shared).compiled is not None

    assert compiled(WIDE)
    assert compiled(WIDE_DFLASH2)
    windows = dataclasses.replace(WIDE_DFLASH2, windows=(6, -1), open_windows=True)
    groups = dataclasses.replace(WIDE_DFLASH2, convolution=Convolution(taps=2, group=8))
    unknown = TINY, DFLASH, DFLASH2, GATED, dataclasses.replace(WIDE, markov_head="rnn"), windows, groups
    assert not any(compiled(config) for config in unknown)
    monkeypatch.setattr(native, "available", lambda: False)
    assert not compiled(WIDE)


def test_a_chain_declines_unknown_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Case("wide", tmp_path / "wide").make()
    embedding, head = made._target_rows
    for rows in (embedding.bfloat16(), embedding.T.contiguous().T):  # another type, or strided
        made._target_rows = rows, head
        made.reload(str(tmp_path / "wide"))
        assert made.compiled is None
    narrow = EagleDrafter.load(eagle_target("authors"), save_eagle(tmp_path / "authors"), gamma=GAMMA)
    assert narrow.compiled is None
    monkeypatch.setattr(native, "available", lambda: False)
    assert EagleDrafter.load(eagle_target("wide"), tmp_path / "wide", gamma=GAMMA).compiled is None


@pytest.mark.parametrize(
    ("name", "positions", "anchors", "error"),
    [
        (
            "dspark", r"positions 40 \.\. 43 are not in the page table \[4, 42\]",
            "index 96 is out of bounds", IndexError,
        ),
        (
            "wide", r"row 2 and positions 72 \.\. 72 are not in the page table \[4, 72\]",
            r"anchors\[0\] is 96, outside 0 \.\. 95", RuntimeError,
        ),
    ],
)  # fmt: skip
def test_mismatches_are_explained(
    name: str, positions: str, anchors: str, error: type[Exception], tmp_path: Path
) -> None:
    case = Case(name, tmp_path)
    made, asked = case.make(), case.asked
    made.propose(asked)
    short = asked.page_table[:, : int(asked.seq_lens[0]) + 2].contiguous()
    with pytest.raises(RuntimeError, match=positions):
        made.propose(dataclasses.replace(asked, page_table=short))
    with pytest.raises(error, match=anchors):
        made.propose(dataclasses.replace(asked, anchors=torch.full((4,), 96)))
