"""Weights in blocks: the numbers of the package gguf, and the bits of `packed_linear`."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from batches import check_rows_are_independent, same_bits
from instruction_sets import EACH_SET, before_a_guard
from margins import assert_near
from references import reference_block_linear

from outrider.kernels.blocks import (
    BLOCK,
    KINDS,
    MINIMA,
    SCALES_AT,
    BlockRows,
    block_depth,
    expand,
    group_blocks,
    pack_blocks,
    quantise_q8_0,
)
from outrider.kernels.cpu import native
from outrider.kernels.linear import pack, packed_linear

COMPILED = pytest.mark.skipif(not native.available(), reason="no compiled kernels here")
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
GGUF_KINDS = [kind for kind in KINDS if not kind.startswith("GROUPS_")]
SIZES = {
    "Q8_0": 0.001, "Q3_K": 0.003, "Q4_K": 0.0003, "Q5_K": 0.0002, "Q6_K": 0.0001, "IQ4_NL": 0.002, "IQ4_XS": 0.0001,
}  # fmt: skip
"""Scales for weights about 0.1; the default is 0.01."""
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def random_blocks(kind: str, outputs: int, depth: int, size: float | None = None) -> torch.Tensor:
    """Blocks with any codes; scales and minima of both signs and magnitude `size`, by default for weights about 0.1."""
    generator = torch.Generator().manual_seed(outputs + depth)
    blocks = depth // block_depth(kind)
    raw = torch.randint(0, 256, (outputs, blocks, KINDS[kind]), generator=generator, dtype=torch.uint8)
    scales = torch.randn(outputs, blocks, 2, generator=generator) * (size or SIZES.get(kind, 0.01))
    if kind.startswith("GROUPS_"):
        codes, zeros = (torch.randint(0, n, (outputs, i), generator=generator) for n, i in ((16, depth), (17, blocks)))
        return group_blocks(codes, zeros, scales[..., 0].half())[0]
    with_scales(raw, kind, scales.half())
    return raw.flatten(1)


def with_scales(blocks: torch.Tensor, kind: str, scales: torch.Tensor) -> None:
    """Overwrite the scales of a GGUF's blocks [..., bytes] by scales [..., 2]; the second is for minima."""
    at, halves = SCALES_AT.get(kind, 0), 2 if kind in MINIMA else 1
    if kind == "MXFP4":  # nearest powers of two; the numbers are doubled
        exponents = scales[..., 0].float().frexp().exponent.clamp(-32, 99) + 128
        blocks[..., 0] = exponents.where(scales[..., 0].isfinite(), 255)
    else:
        blocks[..., at : at + 2 * halves] = scales[..., :halves].contiguous().view(torch.uint8)


def rows_of(count: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, depth, generator=torch.Generator().manual_seed(count + depth)).to(dtype)


@pytest.mark.parametrize("kind", GGUF_KINDS)
@pytest.mark.parametrize("size", [0.01, 3e-7, 9000.0], ids=["usual", "subnormal", "large"])
def test_expands_as_gguf_does(kind, size):
    gguf = pytest.importorskip("gguf")
    raw = random_blocks(kind, 24, 1280, size)
    numbers = gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind])
    assert same_bits(expand(raw, kind, 24, 1280), torch.from_numpy(np.ascontiguousarray(numbers)).bfloat16())


@COMPILED
@EACH_SET
@EACH_KIND
def test_rows_have_the_bits_of_the_expanded_weight(instruction_set, kind):
    depth = 3 * block_depth(kind)
    rows = torch.tensor([23, 0, 7, 23], dtype=torch.int32)
    for size in (None, 3e-7):  # usual, subnormal
        raw = before_a_guard(random_blocks(kind, 24, depth, size))
        assert same_bits(BlockRows(raw, kind, depth)[rows], expand(raw, kind, 24, depth)[rows]), size


def test_rows_are_checked_once_and_must_be_there():
    raw = random_blocks("Q8_0", 4, 64)
    with pytest.raises(RuntimeError if native.available() else IndexError, match="4"):
        BlockRows(raw, "Q8_0", 64)[torch.tensor([0, 4])]
    with_scales(raw.view(4, 2, -1), "Q8_0", torch.full((4, 2, 2), torch.inf).half())
    with pytest.raises(ValueError, match="not finite"):
        BlockRows(raw, "Q8_0", 64)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_groups_have_the_declared_numbers(group, dtype):
    generator = torch.Generator().manual_seed(group)
    codes, zeros = torch.randint(0, 16, (40, 256), generator=generator), torch.randint(0, 17, (40, 256 // group))
    scales = (torch.randn(zeros.shape, generator=generator) / 10).to(dtype)
    raw, kind = group_blocks(codes, zeros, scales)
    expected = (codes.double().view(40, -1, group) - zeros[..., None]) * scales.double()[..., None]
    assert torch.equal(expand(raw, kind, 40, 256), expected.view(40, 256).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantised_rows_are_half_a_step_away_at_most(dtype):
    weight = (torch.randn(24, 320, generator=torch.Generator().manual_seed(5)) * torch.logspace(-6, 3, 24)[:, None]).to(
        dtype
    )
    weight[3, 32:64] = 0
    raw = quantise_q8_0(weight)
    scales = raw.view(24, -1, KINDS["Q8_0"])[..., :2].contiguous().view(torch.float16).float()
    error = (expand(raw, "Q8_0", 24, 320).float() - weight.float()).abs().view(24, -1, BLOCK)
    rounding = weight.float().abs().view(24, -1, BLOCK) * 2**-8  # expanded weights are bfloat16
    assert (error <= scales * 0.5005 + rounding + 2**-25 * 127).all()
    assert not error[3, 1].any()


@COMPILED
@EACH_SET
def test_every_exponent(instruction_set):
    """The three lowest scales of MXFP4 count as 0, the rest equal gguf's."""
    gguf = pytest.importorskip("gguf")
    raw = random_blocks("MXFP4", 228, BLOCK)
    raw[:, 0] = torch.arange(228)
    expected = torch.from_numpy(gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType.MXFP4)).bfloat16()
    expected[:3] = 0
    assert torch.equal(BlockRows(raw, "MXFP4", BLOCK)[torch.arange(228)], expected)
    weight = pack_blocks(raw, "MXFP4", 228, BLOCK)
    assert torch.equal(packed_linear(torch.eye(BLOCK).bfloat16(), weight), expected.T)
    raw[3, 0] = 228
    with pytest.raises(ValueError, match="not below"):
        pack_blocks(raw, "MXFP4", 228, BLOCK)


@cache  # the same for all instruction sets
def usual(kind: str, outputs: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    raw = random_blocks(kind, outputs, depth)
    return raw, expand(raw, kind, outputs, depth)


@COMPILED
@EACH_SET
@EACH_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_the_expanded_weight(instruction_set, kind, dtype):
    for outputs, blocks in ((192, 2), (577, 5), (100, 3), (1, 1)):
        depth = blocks * block_depth(kind)
        raw, expanded = usual(kind, outputs, depth)
        x, bias = rows_of(130, depth, dtype), torch.linspace(-1, 1, outputs)
        packed = pack(expanded.to(dtype), bias)
        blocks = pack_blocks(raw, kind, outputs, depth, bias)
        for rows in (1, 2, 3, 5, 6, 7, 16, 64, 130):
            expected = packed_linear(x[-rows:], packed)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                got = packed_linear(x[-rows:], blocks)
                assert same_bits(got, expected), f"{outputs} x {depth}, {rows} rows, {threads} threads"


@cache
def extreme(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    scales = torch.tensor(
        [0.0, -0.0, 2**-24, -(2**-24), 2**-14, -(2**-14), 65504.0, -65504.0, 1.0, -0.1, 6.1e-5, -3e-6]
    )
    depth = block_depth(kind) * len(scales)
    blocks = random_blocks(kind, 64, depth).view(64, len(scales), KINDS[kind])
    with_scales(blocks, kind, torch.stack([scales, scales.roll(5)], -1).half())
    raw = blocks.flatten(1)
    return raw, expand(raw, kind, 64, depth)


@COMPILED
@EACH_SET
@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_extreme_scales(instruction_set, kind):
    """Multiplying the identity reads the expanded weight."""
    raw, expanded = extreme(kind)
    depth = expanded.shape[1]
    for dtype in (torch.float32, torch.bfloat16):
        got = packed_linear(torch.eye(depth).to(dtype), pack_blocks(raw, kind, 64, depth))
        assert torch.equal(got, expanded.T.to(dtype))


@cache
def every_scale(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Every float16 as a scale, with every other one as a minimum."""
    depth = block_depth(kind)
    scales = torch.arange(-(2**15), 2**15, depth // BLOCK).to(torch.int16).view(torch.float16)
    scales = scales[scales.isfinite()]
    others = scales[torch.randperm(len(scales), generator=torch.Generator().manual_seed(1))]
    blocks = random_blocks(kind, len(scales), depth).view(len(scales), 1, KINDS[kind])
    with_scales(blocks, kind, torch.stack([scales, others], -1)[:, None])
    raw = blocks.flatten(1)
    return raw, expand(raw, kind, len(scales), depth)


@COMPILED
@EACH_SET
@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_every_scale(instruction_set, kind):
    """Sums are rounded to bfloat16 as by torch."""
    raw, expanded = every_scale(kind)
    got = packed_linear(torch.eye(block_depth(kind)).bfloat16(), pack_blocks(raw, kind, *expanded.shape))
    assert torch.equal(got, expanded.T)


@COMPILED
@EACH_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_its_batch(kind, dtype):
    weight = pack_blocks(random_blocks(kind, 200, 768), kind, 200, 768)
    counts = 0, 1, 2, 3, 4, 5, 6, 7, 13, 64, 97
    check_rows_are_independent(partial(packed_linear, weight=weight), rows_of(130, 768, dtype), counts)


@EACH_KIND
def test_without_compiled_kernels(kind, monkeypatch):
    monkeypatch.setattr(native, "available", lambda: False)
    raw, bias = random_blocks(kind, 37, 256), torch.linspace(-1, 1, 37)
    weight = pack_blocks(raw, kind, 37, 256, bias)
    assert weight.panels is None
    assert torch.equal(weight.plain, expand(raw, kind, 37, 256))
    for dtype in (torch.float32, torch.bfloat16):
        x = rows_of(3, 256, dtype)
        expected = reference_block_linear(x, raw, kind, 37, bias.to(dtype))
        assert_near(packed_linear(x, weight), expected, 256)


@pytest.mark.parametrize(
    ("kind", "depth", "bias", "message"),
    [
        ("Q4_1", 48, None, "multiple of 32, got 48"),
        ("Q4_K", 64, None, "Q4_K must be a multiple of 256, got 64"),
        ("IQ3_S", 64, None, "IQ3_S are not known, only Q4_0, Q4_1, Q5_0"),
        ("Q8_0", 64, None, r"Q8_0 weight \[8, 64\] has 544 bytes, got 320"),
        ("Q4_1", 64, torch.zeros(7), r"expected a bias \[8\]"),
    ],
)
def test_blocks_that_do_not_fit_are_explained(kind, depth, bias, message):
    with pytest.raises(ValueError, match=message):
        pack_blocks(random_blocks("Q4_1", 8, 64), kind, 8, depth, bias)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (torch.zeros(8, 16).half(), "not 256 / 16"),
        (torch.full((8, 2), 0.1), "numbers of float16 or bfloat16"),
        (torch.full((8, 2), 2.0**100), "below 2"),
    ],
)
def test_groups_that_do_not_fit_are_explained(scales, message):
    with pytest.raises(ValueError, match=message):
        group_blocks(torch.zeros(8, 256), torch.zeros(scales.shape), scales)


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_infinite_scales_and_rows_of_another_depth_are_explained(kind):
    raw = random_blocks(kind, 8, 512)
    with pytest.raises(ValueError, match="depth 32, the weight 512"):
        packed_linear(torch.zeros(1, 32), pack_blocks(raw, kind, 8, 512))
    with_scales(raw.view(8, -1, KINDS[kind])[3, 1], kind, torch.tensor([float("inf"), 1.0]).half())
    with pytest.raises(ValueError, match="not finite"):
        pack_blocks(raw, kind, 8, 512)
