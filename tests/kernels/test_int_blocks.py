"""Integer products of blocks have the bits of their reference, in every instruction set."""

from functools import cache

import pytest
import torch
from batches import assert_same_bits
from instruction_sets import EACH_SET
from int_blocks import fma, reference_int_block_linear
from references import reference_linear
from test_blocks import EACH_KIND, GGUF_KINDS, random_blocks, rows_of, with_scales

from outrider.kernels.blocks import KINDS, ROUNDED, block_depth, expand, pack_blocks
from outrider.kernels.cpu import native
from outrider.kernels.decoder import DecoderLayer
from outrider.kernels.linear import packed_linear
from outrider.kernels.weights import multiply, stack

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiled kernels here")
BOTH_TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def check(got: torch.Tensor, expected: torch.Tensor, about: str = "") -> None:
    whole = torch.int16 if got.dtype == torch.bfloat16 else torch.int32
    assert got.dtype == expected.dtype
    same = (got.view(whole) == expected.view(whole)) | (got.isnan() & expected.isnan())
    assert same.all(), f"{about}: {int((~same).sum())} of {same.numel()} differ"


@cache  # the same for all instruction sets
def usual(kind: str, outputs: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Blocks, rows, a bias, and the reference's product."""
    raw, x, bias = random_blocks(kind, outputs, depth), rows_of(70, depth, dtype), torch.linspace(-1, 1, outputs)
    x[3] = 0
    return raw, x, bias, reference_int_block_linear(x, raw, kind, outputs, bias)


@EACH_SET
@EACH_KIND
@BOTH_TYPES
def test_bits_of_the_reference(instruction_set, kind, dtype):
    """The slow emulation runs only on rows around whole tiles."""
    emulated = instruction_set.endswith("emulated")
    counts = (1, 16, 17, 18, 33, 64, 70) if emulated else (*range(1, 18), 33, 64, 70)
    for outputs, blocks in ((193, 3), (70, 2), (1, 1)):
        depth = blocks * block_depth(kind)
        raw, x, bias, expected = usual(kind, outputs, depth, dtype)
        weight = pack_blocks(raw, kind, outputs, depth, bias, activations="int8")
        assert weight.kind & ROUNDED
        for threads in (2,) if emulated else (1, 2):
            torch.set_num_threads(threads)
            for rows in counts:
                about = f"{outputs} x {depth}, {rows} rows, {threads} threads"
                check(packed_linear(x[:rows], weight), expected[:rows], about)
                check(packed_linear(x[-rows:], weight), expected[-rows:], f"{about}, the last")


@cache
def limits(kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The largest sums, NaN, infinities, subnormal numbers and ties; their product."""
    depth = 2 * block_depth(kind)
    raw = random_blocks(kind, 40, depth)
    x = rows_of(9, depth, dtype)
    x[0], x[1], x[2] = 1.0, -1.0, x[2] * 1e-41
    x[3, 5], x[4, 1], x[5, depth - 1] = torch.nan, torch.inf, -torch.inf
    x[6], x[7] = torch.arange(depth) % 256 - 127.5, x[7] * 1e36
    x[6, 0] = 127
    return raw, x, reference_int_block_linear(x, raw, kind, 40)


@EACH_SET
@EACH_KIND
@BOTH_TYPES
def test_numbers_at_the_limits(instruction_set, kind, dtype):
    raw, x, expected = limits(kind, dtype)
    got = packed_linear(x, pack_blocks(raw, kind, 40, x.shape[1], activations="int8"))
    check(got, expected)
    assert got[3:6].isnan().all()
    assert not got[[0, 1, 2, 6, 8]].isnan().any()


@EACH_SET
@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_codes_at_the_limits(instruction_set, kind):
    """No sum may saturate."""
    fills, depth = (0x00, 0x77, 0x7F, 0x80, 0xFF), 2 * block_depth(kind)
    raw = torch.tensor(fills, dtype=torch.uint8)[:, None, None].repeat(8, 2, KINDS[kind])
    with_scales(raw, kind, torch.tensor([0.01, 0.02]).half().expand(len(raw), 2, 2))
    x = torch.ones(4, depth)
    x[1], x[2, ::2], x[3, : depth // 2] = -1, -1, -1
    got = packed_linear(x, pack_blocks(raw.flatten(1), kind, len(raw), depth, activations="int8"))
    check(got, reference_int_block_linear(x, raw.flatten(1), kind, len(raw)))


@EACH_KIND
def test_near_the_product_of_floats(kind):
    x, raw = rows_of(5, 1024, torch.float32), random_blocks(kind, 60, 1024)
    got = packed_linear(x, pack_blocks(raw, kind, 60, 1024, activations="int8"))
    expected = reference_linear(x, expand(raw, kind, 60, 1024).float())
    assert (got - expected).norm() < 0.02 * expected.norm()


def test_fma_rounds_once():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 2**16, generator=generator)
    c = (-a.double() * b.double()).float() * (1 + torch.randint(-2, 3, a.shape, generator=generator) * 2.0**-23)
    exact = [float(x) * float(y) + float(z) for x, y, z in zip(a[:9], b[:9], c[:9], strict=True)]  # exact
    assert fma(a, b, c)[:9].tolist() == torch.tensor(exact, dtype=torch.float64).float().tolist()
    assert fma(a, b, c).ne(a * b + c).any()


@BOTH_TYPES
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_a_layer_of_several_kinds_has_the_bits_of_its_operations(dtype, activations):
    hidden, heads, kv_heads, width, mlp = 256, 6, 2, 32, 512
    parts = [
        [(heads * width, hidden, "Q4_K"), (kv_heads * width, hidden, "Q8_0"), (kv_heads * width, hidden, "Q6_K")],
        [(hidden, heads * width, "Q4_1")],
        [(mlp, hidden, "Q5_K"), (mlp, hidden, "Q4_0")],
        [(hidden, mlp, "Q6_K")],
    ]
    weights = [
        stack([pack_blocks(random_blocks(k, o, d), k, o, d, activations=activations) for o, d, k in own])
        for own in parts
    ]
    layer = DecoderLayer(weights, [torch.ones(hidden).to(dtype)] * 2, eps=1e-5, scale=width**-0.5)
    assert_same_bits([layer] * 2, dtype, {"ragged": ([1, 5, 3], [60, 9, 130]), "one": ([1], [40])})


def test_a_stack_is_checked():
    raw = random_blocks("Q4_0", 8, 64)
    part = pack_blocks(raw, "Q4_0", 8, 64)
    assert multiply(torch.ones(2, 64), stack([part, part])).shape == (2, 16)
    with pytest.raises(ValueError, match="one depth without biases"):
        stack([part, pack_blocks(raw, "Q4_0", 8, 64, torch.zeros(8))])
