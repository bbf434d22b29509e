"""A layer in one call gives the bits of its single operations."""

import pytest
import torch
from batches import assert_same_layer

from outrider.kernels.cpu import native
from outrider.kernels.int8 import pack_int8
from outrider.kernels.layer import DecoderLayer
from outrider.kernels.linear import pack

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiled kernels here")

HIDDEN, HEADS, KV_HEADS, WIDTH, MLP = 96, 6, 2, 32, 160


def make_layer(prepare, dtype: torch.dtype) -> DecoderLayer:
    generator = torch.Generator().manual_seed(0)
    shapes = [((HEADS + 2 * KV_HEADS) * WIDTH, HIDDEN), (HIDDEN, HEADS * WIDTH), (2 * MLP, HIDDEN), (HIDDEN, MLP)]
    weights = [prepare((torch.randn(shape, generator=generator) / 8).to(dtype)) for shape in shapes]
    norms = [torch.rand(HIDDEN, generator=generator).to(dtype) for _ in range(2)]
    return DecoderLayer(weights, norms, eps=1e-5, scale=WIDTH**-0.5, window=40)


@pytest.mark.parametrize("prepare", [pack, pack_int8], ids=["packed", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", [True, False])
def test_same_bits_as_the_single_operations(prepare, dtype, first):
    layer = make_layer(prepare, dtype)
    assert_same_layer(layer, dtype, heads=(HEADS, KV_HEADS), width=WIDTH, hidden=HIDDEN, first=first)


def test_what_does_not_fit_is_explained():
    layer = make_layer(pack, torch.float32)
    with pytest.raises(ValueError, match="4 weights and 2 norms"):
        DecoderLayer(layer.weights[:3], layer.norms, eps=1e-5, scale=1.0)
    biased = [*layer.weights[:3], pack(torch.zeros(HIDDEN, MLP), torch.zeros(HIDDEN))]
    with pytest.raises(ValueError, match="biases"):
        DecoderLayer(biased, layer.norms, eps=1e-5, scale=1.0)
    with pytest.raises(ValueError, match="prepared alike"):
        DecoderLayer([*layer.weights[:3], pack_int8(torch.zeros(HIDDEN, MLP))], layer.norms, eps=1e-5, scale=1.0)


def test_time_is_counted_only_when_asked():
    weight = pack(torch.ones(64, 64))
    torch.ops.outrider.time_spent(True)
    torch.ops.outrider.packed_linear(torch.ones(1, 64), weight.panels, None, 64)
    products, *others = torch.ops.outrider.time_spent(False)
    assert products > 0
    assert not any(others)
    torch.ops.outrider.packed_linear(torch.ones(1, 64), weight.panels, None, 64)
    assert not any(torch.ops.outrider.time_spent(False))
