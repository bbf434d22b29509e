"""Weights in a GGUF's blocks: the numbers of the package gguf, the bits of `packed_linear` on the expanded weights."""

import ctypes
import mmap

import numpy as np
import pytest
import torch
from batches import ragged_attention

from outrider.kernels.blocks import (
    BLOCK,
    KINDS,
    block_linear,
    expand,
    pack_blocks,
    quantise_q8_0,
    reference_block_linear,
)
from outrider.kernels.cpu import native
from outrider.kernels.int8 import multiply, pack_int8
from outrider.kernels.layer import DecoderLayer, decoder_layer, reference_decoder_layer
from outrider.kernels.linear import pack, packed_linear

COMPILED = pytest.mark.skipif(not native.available(), reason="no compiled kernels here")
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
TYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)], ids=["float32", "bfloat16"]
)
SETS = ["scalar", "avx2", "avx512", "avx512bf16"]


@pytest.fixture
def instruction_set(request):
    chosen = native.instruction_set()
    try:
        torch.ops.outrider.use_instruction_set(request.param)
    except RuntimeError:
        pytest.skip("this processor does not run it")
    yield request.param
    torch.ops.outrider.use_instruction_set(chosen)


EACH_SET = pytest.mark.parametrize("instruction_set", SETS, indirect=True)


def random_blocks(kind: str, outputs: int, depth: int, size: float | None = None) -> torch.Tensor:
    """Any codes; scales and minima of both signs around `size`, by default for weights about 0.1: rows of bytes."""
    size = size or (0.001 if kind == "Q8_0" else 0.01)
    generator = torch.Generator().manual_seed(outputs + depth)
    raw = torch.randint(0, 256, (outputs, depth // BLOCK, KINDS[kind]), generator=generator, dtype=torch.uint8)
    halves = 2 if kind == "Q4_1" else 1
    scales = (torch.randn(outputs, depth // BLOCK, halves, generator=generator) * size).half()
    raw[..., : 2 * halves] = scales.view(torch.uint8)
    return raw.flatten(1)


def rows_of(count: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, depth, generator=torch.Generator().manual_seed(count + depth)).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    whole = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return a.dtype == b.dtype and torch.equal(a.view(whole), b.view(whole))


@EACH_KIND
@TYPES
@pytest.mark.parametrize(("outputs", "depth"), [(192, 576), (100, 64), (37, 96), (1, 32)])
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_reference(kind, dtype, tolerance, outputs, depth, rows, with_bias):
    raw, x = random_blocks(kind, outputs, depth), rows_of(rows, depth, dtype)
    bias = torch.linspace(-1, 1, outputs).to(dtype) if with_bias else None
    got = multiply(x, pack_blocks(raw, kind, outputs, depth, bias))
    assert got.dtype == dtype
    expected = reference_block_linear(x, raw, kind, outputs, bias)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@EACH_KIND
@pytest.mark.parametrize("size", [0.01, 3e-7, 9000.0], ids=["usual", "subnormal", "large"])
def test_expands_as_gguf_does(kind, size):
    gguf = pytest.importorskip("gguf")
    raw = random_blocks(kind, 24, 320, size)
    numbers = gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind])
    assert same_bits(expand(raw, kind, 24, 320), torch.from_numpy(np.ascontiguousarray(numbers)).bfloat16())


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
@EACH_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_of_the_expanded_weight(instruction_set, kind, dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for outputs, depth in ((192, 576), (577, 1536), (100, 64), (1, 32)):
            raw, x = random_blocks(kind, outputs, depth), rows_of(130, depth, dtype)
            bias = torch.linspace(-1, 1, outputs)
            packed = pack(expand(raw, kind, outputs, depth).to(dtype), bias)
            blocks = pack_blocks(raw, kind, outputs, depth, bias)
            for rows in (1, 2, 3, 5, 6, 7, 16, 97, 130):
                got, expected = block_linear(x[-rows:], blocks), packed_linear(x[-rows:], packed)
                assert same_bits(got, expected), f"{outputs} x {depth}, {rows} rows"
    finally:
        torch.set_num_threads(before)


@COMPILED
@EACH_SET
@EACH_KIND
def test_extreme_scales(instruction_set, kind):
    """One row of the identity after another reads the expanded weight itself."""
    scales = [0.0, -0.0, 2**-24, -(2**-24), 2**-14, -(2**-14), 65504.0, -65504.0, 1.0, -0.1, 6.1e-5, -3e-6]
    depth = BLOCK * len(scales)
    blocks = random_blocks(kind, 64, depth).view(64, len(scales), KINDS[kind])
    extremes = torch.tensor(scales).half().view(torch.uint8).view(-1, 2)
    blocks[..., :2] = extremes
    if kind == "Q4_1":
        blocks[..., 2:4] = extremes.roll(5, 0)
    raw = blocks.flatten(1)
    for dtype in (torch.float32, torch.bfloat16):
        got = block_linear(torch.eye(depth).to(dtype), pack_blocks(raw, kind, 64, depth))
        assert torch.equal(got, expand(raw, kind, 64, depth).T.to(dtype))


@COMPILED
@EACH_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_its_batch(kind, dtype):
    x, weight = rows_of(130, 576, dtype), pack_blocks(random_blocks(kind, 200, 576), kind, 200, 576)
    together = block_linear(x, weight)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 64, 97):
        assert same_bits(block_linear(x[:rows], weight), together[:rows]), f"{rows} rows"
        assert same_bits(block_linear(x[-rows:], weight), together[-rows:]), f"last {rows} rows"


@COMPILED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", [True, False])
def test_a_layer_has_the_bits_of_its_operations(dtype, first):
    hidden, heads, kv_heads, width, mlp = 96, 6, 2, 32, 160
    shapes = [((heads + 2 * kv_heads) * width, hidden), (hidden, heads * width), (2 * mlp, hidden), (hidden, mlp)]
    kinds = ["Q4_1", "Q8_0", "Q4_0", None]  # the last one in panels
    weights = [pack_blocks(random_blocks(k, *s), k, *s) for s, k in zip(shapes, kinds, strict=True) if k]
    weights.append(pack((rows_of(*shapes[3], torch.float32) / 8).to(dtype)))
    layer = DecoderLayer(weights, [torch.ones(hidden).to(dtype)] * 2, eps=1e-5, scale=width**-0.5)
    q, k_pool, v_pool, batch = ragged_attention([1, 5, 3], [60, 9, 130], heads=(heads, kv_heads), dims=(width, width))
    slots = batch.page_table[batch.rows[batch.requests_of_tokens], batch.positions].long()
    cos_sin = torch.randn(200, width, generator=torch.Generator().manual_seed(1))
    rows = torch.randn(2, len(q), hidden, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = []
    for run in (decoder_layer, reference_decoder_layer):
        x, residual = rows.clone()
        pools = k_pool.to(dtype, copy=True), v_pool.to(dtype, copy=True)
        out = run(None if first else x, residual, layer, batch.positions, cos_sin, *pools, slots, batch)
        found.append((out, residual, *pools))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)  # slots nobody owns hold NaN
    with pytest.raises(ValueError, match="prepared alike"):
        DecoderLayer([*weights[:3], pack_int8(torch.zeros(hidden, mlp))], layer.norms, eps=1e-5, scale=1.0)


@COMPILED
@EACH_SET
@EACH_KIND
def test_nothing_past_the_end_is_read(instruction_set, kind):
    """Packed blocks, rows and the file's bytes that end where a page ends; the next page may not be touched."""
    outputs, depth = 70, 96
    raw = before_a_guard(random_blocks(kind, outputs, depth))
    packed = pack_blocks(raw, kind, outputs, depth)
    blocks = before_a_guard(packed.blocks)
    for rows in (1, 7):
        for dtype in (torch.float32, torch.bfloat16):
            x = before_a_guard(rows_of(rows, depth, dtype))
            got = torch.ops.outrider.block_linear(x, blocks, packed.kind, None, outputs)
            assert same_bits(got, block_linear(x, packed))


def before_a_guard(x: torch.Tensor) -> torch.Tensor:
    """A copy of x whose last byte is the last one before a page that may not be read."""
    size, page = x.numel() * x.element_size(), mmap.PAGESIZE
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start + pages * page), ctypes.c_size_t(page), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=pages * page - size)
    return copy.copy_(x.flatten()).view(x.shape)


@EACH_KIND
def test_without_compiled_kernels(kind, monkeypatch):
    monkeypatch.setattr(native, "available", lambda: False)
    raw, bias = random_blocks(kind, 37, 64), torch.linspace(-1, 1, 37)
    weight = pack_blocks(raw, kind, 37, 64, bias)
    assert weight.blocks is None
    assert torch.equal(weight.plain, expand(raw, kind, 37, 64))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        x = rows_of(3, 64, dtype)
        expected = reference_block_linear(x, raw, kind, 37, bias.to(dtype))
        torch.testing.assert_close(block_linear(x, weight), expected, rtol=tolerance, atol=tolerance)


def test_what_does_not_fit_is_explained():
    raw = random_blocks("Q4_1", 8, 64)
    with pytest.raises(ValueError, match="multiple of 32, got 48"):
        pack_blocks(raw, "Q4_1", 8, 48)
    with pytest.raises(ValueError, match="Q6_K are not known, only Q4_0, Q4_1, Q8_0"):
        pack_blocks(raw, "Q6_K", 8, 64)
    with pytest.raises(ValueError, match=r"Q8_0 weight \[8, 64\] has 544 bytes, got 320"):
        pack_blocks(raw, "Q8_0", 8, 64)
    with pytest.raises(ValueError, match=r"expected a bias \[8\]"):
        pack_blocks(raw, "Q4_1", 8, 64, torch.zeros(7))
    with pytest.raises(ValueError, match="depth 32, the weight 64"):
        block_linear(torch.zeros(1, 32), pack_blocks(raw, "Q4_1", 8, 64))
    raw[3, :2] = torch.tensor([float("inf")]).half().view(torch.uint8)
    with pytest.raises(ValueError, match="not finite"):
        pack_blocks(raw, "Q4_1", 8, 64)
