"""The compiled block equals the plain model, and declines unknown models."""

import dataclasses
from unittest.mock import patch

import pytest
import torch
from instruction_sets import SETS, using
from margins import assert_near
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

from outrider.drafters.base import Draft, DraftBatch, Features
from outrider.drafters.block import compiled as compiled_block
from outrider.drafters.block.choosing import Convolution
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.block.layers import RowConvolution
from outrider.kernels.cpu import native
from outrider.kernels.noise import torch_gumbel_argmax

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiled kernels here")

VARIANTS = {
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
EACH = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
LENGTHS = torch.tensor([40, 1, 23, 17])


def drafts(
    config: BlockConfig, dtype: torch.dtype, temperatures: list[float], **rules: torch.Tensor | bool
) -> tuple[list[Draft], list[torch.Tensor]]:
    """The compiled and the plain draft of four requests with the same state, and both pools."""
    model = make_model(config).to(dtype)
    shared = (torch.randn(config.vocab_size, config.hidden_size) * 0.3).to(dtype)
    width = int(LENGTHS.max()) + config.queries
    table = torch.randperm(len(LENGTHS) * width).int().view(-1, width)
    batch = DraftBatch(
        anchors=torch.tensor([3, 90, 14, 3]),
        seq_lens=LENGTHS,
        page_table=table,
        rows=torch.tensor([2, 0, 3, 1]),
        temperatures=torch.tensor(temperatures),
        keys=torch.randint(2**62, (len(LENGTHS), config.gamma)),
        **rules,
    )
    slots = torch.cat([table[row, :length] for row, length in zip(batch.rows, LENGTHS, strict=True)]).long()
    positions = torch.cat([torch.arange(int(length)) for length in LENGTHS])
    hidden = torch.randn(len(slots), len(config.target_layers) * config.hidden_size).to(dtype)
    drafted, states = [], []
    for compiled in (True, False):
        drafter = BlockDrafter(model, embedding=shared, head=shared)
        assert drafter.compiled is not None
        if not compiled:
            drafter.compiled = None
        drafter.allocate(table.numel())
        drafter.observe(Features(hidden, torch.zeros_like(slots), positions, slots))
        states.append(torch.stack([pool for pair in drafter.pools for pool in pair]))
        drafted.append(drafter.propose(batch))
    return drafted, states


@pytest.mark.parametrize("config", (VARIANTS | PATHS).values(), ids=VARIANTS | PATHS)
def test_float32_drafts_equal_the_plain_model(config: BlockConfig) -> None:
    filters = {"top_ks": torch.tensor([1, 5, 2**30, 2**30]), "top_ps": torch.tensor([1.0, 0.8, 0.5, 1.0])}
    for heat, rules in (([0.0] * 4, {}), ([0.0, 0.7, 1.0, 1.3], {}), ([0.0, 0.7, 1.0, 1.3], filters)):
        (ours, plain), states = drafts(config, torch.float32, heat, **rules)
        assert_near(*states, TERMS)
        assert torch.equal(ours.tokens, plain.tokens)
        assert torch.equal(ours.lens, plain.lens)
        assert_near(ours.confidence, plain.confidence, TERMS)
        if max(heat) == 0:
            assert ours.probs is None is plain.probs
        else:
            assert_near(ours.probs[1:], plain.probs[1:], TERMS)
            assert not rules or ((ours.probs[1:] > 0).sum(-1)[0] <= 5).all()
            (unasked, unasked_plain), _ = drafts(config, torch.float32, heat, wants_probs=False, **rules)
            assert unasked.probs is None is unasked_plain.probs
            assert torch.equal(unasked.tokens, ours.tokens)
            assert torch.equal(unasked_plain.tokens, ours.tokens)
        assert (ours.vocab is None) == (plain.vocab is None)


@EACH
@pytest.mark.parametrize("sets", [(), compiled_block.MULTIPLIES_BYTES], ids=["blocks", "bytes"])
def test_bfloat16_drafts_in_eight_bits_are_near_the_plain_model(
    config: BlockConfig, sets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_block, "MULTIPLIES_BYTES", sets)
    (ours, plain), states = drafts(config, torch.bfloat16, [0.0, 0.7, 1.0, 1.3])
    error = (states[0] - states[1]).float().norm() / states[1].float().norm()
    assert error < 0.02
    assert (ours.confidence[:, 0] - plain.confidence[:, 0]).abs().max() < 0.08
    distance = (ours.probs[1:, 0] - plain.probs[1:, 0]).abs().sum(-1) / 2  # later ones depend on the draws
    assert distance.max() < 0.1


def plain_pass(drafter: BlockDrafter, asked: DraftBatch) -> tuple[torch.Tensor, torch.Tensor]:
    with patch.object(drafter, "_draw", return_value=(None, None, None)) as draw:
        drafter._propose(asked)
    logits, hidden, _ = draw.call_args.args
    return logits, hidden


@pytest.mark.parametrize("config", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("name", SETS.values())
def test_states_and_logits_before_a_path_is_drawn(config: BlockConfig, name: str) -> None:
    """They are equal in float32, near in 8 bits, and independent of other requests."""
    with using(name):
        for dtype, close in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
            model = make_model(config).to(dtype)
            for convolution in model.modules():
                if isinstance(convolution, RowConvolution):  # near their initial values, as in training
                    convolution.kernel_projection.weight.mul_(0.2)
                    convolution.base_kernel[:, 0] += 1
            shared = (torch.randn(config.vocab_size, config.hidden_size) * 0.3).to(dtype)
            drafter = BlockDrafter(model, embedding=shared, head=shared)
            drafter.allocate(256)
            table, lengths = torch.randperm(256).int().view(4, 64), LENGTHS
            slots = torch.cat([table[row, :length] for row, length in enumerate(lengths)]).long()
            positions = torch.cat([torch.arange(int(length)) for length in lengths])
            hidden = torch.randn(len(slots), len(config.target_layers) * config.hidden_size).to(dtype)
            drafter.observe(Features(hidden, torch.zeros_like(slots), positions, slots))
            asked = DraftBatch(
                anchors=torch.tensor([3, 90, 14, 3]), seq_lens=lengths, page_table=table, rows=torch.arange(4),
                temperatures=torch.zeros(4), keys=torch.zeros(4, config.gamma, dtype=torch.int64),
            )  # fmt: skip
            assert drafter.compiled is not None
            logits, states = drafter.compiled.forward(asked, config.gamma)
            for ours, plain in zip((logits, states), plain_pass(drafter, asked), strict=True):
                error = (ours - plain).float().norm() / plain.float().norm()
                assert error < close
            for row in range(4):
                alone = drafter.compiled.forward(asked.select(torch.tensor([row])), config.gamma)
                assert torch.equal(alone[0][0], logits[row])
                assert torch.equal(alone[1][0], states[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_decide_the_draws(dtype: torch.dtype) -> None:
    """Given the earlier tokens, each key draws from q, which is the same for all keys."""
    config, count = WIDE, 400
    drafter = BlockDrafter(make_model(config).to(dtype), embedding=(e := torch.randn(96, 64).to(dtype)), head=e)
    drafter.allocate(64)
    for k in range(config.gamma):
        keys = torch.full((count, config.gamma), 37)
        keys[:, k] = torch.arange(count)
        draft = drafter.propose(
            DraftBatch(
                anchors=torch.full((count,), 3),
                seq_lens=torch.full((count,), 9),
                page_table=torch.arange(64).int().view(1, -1),
                rows=torch.zeros(count, dtype=torch.int64),
                temperatures=torch.full((count,), 4.0),
                keys=keys,
            )
        )
        assert torch.equal(draft.probs[:, k], draft.probs[:1, k].expand(count, -1))  # q is known before the draw
        drawn = torch_gumbel_argmax(draft.probs[:, k], keys[:, k], draft.vocab)
        assert len(set(drawn.tolist())) > 5
        assert torch.equal(draft.tokens[:, k], draft.vocab[drawn])


def test_it_declines_unknown_models(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_mismatches_are_explained() -> None:
    drafter = BlockDrafter(make_model(WIDE), embedding=(e := torch.randn(96, 64)), head=e)
    drafter.allocate(64)
    batch = DraftBatch(
        anchors=torch.tensor([3]),
        seq_lens=torch.tensor([61]),
        page_table=torch.arange(64).int().view(1, -1),
        rows=torch.tensor([0]),
        temperatures=torch.zeros(1),
        keys=torch.zeros(1, 4, dtype=torch.int64),
    )
    with pytest.raises(RuntimeError, match=r"positions 61 \.\. 64 are not in the page table \[1, 64\]"):
        drafter.propose(batch)
    with pytest.raises(IndexError, match="index 96 is out of bounds"):
        drafter.propose(dataclasses.replace(batch, seq_lens=torch.tensor([9]), anchors=torch.tensor([96])))
