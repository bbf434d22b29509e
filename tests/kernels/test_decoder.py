"""All layers in one call give the bits of their single operations."""

from dataclasses import replace

import pytest
import torch
from batches import assert_same_bits, ragged_attention
from instruction_sets import TILE_SETS

from outrider.kernels.cpu import native
from outrider.kernels.decoder import Decoder, DecoderLayer
from outrider.kernels.linear import pack
from outrider.kernels.weights import pack_int8

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiled kernels here")

HIDDEN, HEADS, KV_HEADS, WIDTH, MLP, LAYERS = 96, 6, 2, 32, 160, 3
BATCHES = {  # queries and cached positions of each request
    "decode": ([1], [60]),
    "a long cache, in chunks": ([1], [1100]),
    "decode of many": ([1] * 33, [5 * i + 1 for i in range(33)]),
    "ragged verify": ([1, 5, 3], [60, 9, 130]),
    "prefill": ([150, 40], [150, 70]),
}


def blocks(weight: torch.Tensor):
    return pack_int8(weight, activations="float")


def mixed(weight: torch.Tensor):
    return (blocks if weight.shape[0] == HIDDEN else pack)(weight)


def make_layers(prepare, dtype: torch.dtype, mlp: int = MLP, qwen: bool = False) -> list[DecoderLayer]:
    generator = torch.Generator().manual_seed(0)
    shapes = [((HEADS + 2 * KV_HEADS) * WIDTH, HIDDEN), (HIDDEN, HEADS * WIDTH), (2 * mlp, HIDDEN), (HIDDEN, mlp)]
    layers = []
    for number in range(LAYERS):
        weights = [prepare((torch.randn(shape, generator=generator) / 8).to(dtype)) for shape in shapes]
        norms = [torch.rand(HIDDEN, generator=generator).to(dtype) for _ in range(2)]
        window, cap = (40, 0.0) if number % 2 else (-1, 20.0)
        layer = DecoderLayer(weights, norms, eps=1e-5, scale=WIDTH**-0.5, window=window, logit_cap=cap)
        if qwen:
            of_heads = [torch.rand(WIDTH, generator=generator).to(dtype) for _ in range(2)]
            bias = torch.randn(shapes[0][0], generator=generator).to(dtype)
            layer = replace(layer, head_norms=of_heads, bias=bias)
        layers.append(layer)
    return layers


@pytest.fixture(params=[1, 2, pytest.param(3, marks=pytest.mark.slow)], ids="{} threads".format)
def threads(request):
    torch.set_num_threads(request.param)


@pytest.mark.parametrize("prepare", [pack, pack_int8, blocks, mixed], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_as_the_single_operations(prepare, dtype, threads):
    assert_same_bits(make_layers(prepare, dtype), dtype, BATCHES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_with_a_bias_and_norms_of_queries_and_keys(dtype, threads):
    assert_same_bits(make_layers(mixed, dtype, qwen=True), dtype, BATCHES)


@TILE_SETS
@pytest.mark.parametrize("mlp", [MLP, 4096], ids=["all rows of a thread at once", "128 of them"])
def test_same_bits_where_each_thread_takes_rows_of_its_own(instruction_set, mlp, threads):
    layers = make_layers(mixed, torch.bfloat16, mlp)
    assert_same_bits(layers, torch.bfloat16, {"prefill": ([250, 170], [260, 300])})


def test_the_same_call_again_gives_the_same(threads):
    """Counters and barriers are reset, whichever thread came last."""
    layers = make_layers(pack, torch.bfloat16)
    _, k_pool, v_pool, batch = ragged_attention([1, 2], [400, 300], heads=(HEADS, KV_HEADS), dims=(WIDTH, WIDTH))
    pools = [(k_pool.bfloat16(), v_pool.bfloat16()) for _ in layers]
    decoder = Decoder(layers, pools, torch.ones(HIDDEN).bfloat16(), torch.randn(1200, WIDTH))
    slots = batch.page_table[batch.rows[batch.requests_of_tokens], batch.positions].long()
    x = torch.randn(batch.tokens, HIDDEN).bfloat16()
    first = decoder.forward(x.clone(), batch.positions, slots, batch)[0]
    for _ in range(50):
        assert torch.equal(decoder.forward(x.clone(), batch.positions, slots, batch)[0], first)


def test_mismatches_are_explained():
    layers = make_layers(pack, torch.float32)
    pools = [(torch.zeros(9, KV_HEADS, WIDTH), torch.zeros(9, KV_HEADS, WIDTH)) for _ in layers]
    norm, cos_sin = torch.ones(HIDDEN), torch.zeros(8, WIDTH)
    _, _, _, batch = ragged_attention([1], [1])
    with pytest.raises(ValueError, match="a pool for each of 3 layers, got 2"):
        Decoder(layers, pools[:2], norm, cos_sin)
    with pytest.raises(RuntimeError, match="heads do not fit"):
        Decoder(layers, [(torch.zeros(9, 9, WIDTH),) * 2] * 3, norm, cos_sin)
    with pytest.raises(RuntimeError, match="a norm of heads"):
        Decoder([replace(layer, head_norms=layer.norms) for layer in layers], pools, norm, cos_sin)
    with pytest.raises(RuntimeError, match="a bias"):
        Decoder([replace(layer, bias=norm) for layer in layers], pools, norm, cos_sin)
    decoder, zero = Decoder(layers, pools, norm, cos_sin), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"slots\[0\] is 9, outside 0 \.\. 8"):
        decoder.forward(torch.ones(1, HIDDEN), zero, zero + 9, batch)
    with pytest.raises(RuntimeError, match=r"rise within 1 \.\. 2"):
        decoder.forward(torch.ones(1, HIDDEN), zero, zero, batch, [0])


def test_a_layer_that_does_not_fit_is_explained():
    layer = make_layers(pack, torch.float32)[0]
    with pytest.raises(ValueError, match="4 weights and 2 norms"):
        DecoderLayer(layer.weights[:3], layer.norms, eps=1e-5, scale=1.0)
    with pytest.raises(ValueError, match="a norm each or none, got 1"):
        DecoderLayer(layer.weights, layer.norms, eps=1e-5, scale=1.0, head_norms=layer.norms[:1])
    biased = [*layer.weights[:3], pack(torch.zeros(HIDDEN, MLP), torch.zeros(HIDDEN))]
    with pytest.raises(ValueError, match="biases"):
        DecoderLayer(biased, layer.norms, eps=1e-5, scale=1.0)
