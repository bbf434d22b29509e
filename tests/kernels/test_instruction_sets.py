"""Every compiled variant that this processor runs agrees with the references."""

import pytest
import torch
from batches import ragged_attention
from instruction_sets import EACH_SET, before_a_guard
from references import plain, reference_attention, reference_linear, reference_target_probs

from outrider.kernels import fused
from outrider.kernels.attention import flat_attention
from outrider.kernels.cpu import native
from outrider.kernels.flat_batch import FlatBatch
from outrider.kernels.linear import pack, packed_linear
from outrider.kernels.noise import torch_gumbel_argmax
from outrider.kernels.sampling import Rules, draw_tokens, target_probs

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="no compiled kernels here"),
    pytest.mark.usefixtures("instruction_set"),
    EACH_SET,
]

TYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["float32", "bfloat16"]
)


def test_the_variant_is_used(instruction_set):
    assert native.instruction_set() == instruction_set


@TYPES
def test_attention(dtype, tolerance):
    q, k, v, batch = ragged_attention([1, 7, 30], [300, 9, 290], heads=(6, 2), dims=(48, 80), dtype=dtype)
    for options in ({}, {"logit_cap": 3.0}, {"causal": False, "window": 20}):
        got, expected = (f(q, k, v, batch, scale=0.2, **options) for f in (flat_attention, reference_attention))
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [(64, 80), (48, 64)], ids=str)
def test_decoding_many_requests_has_the_bits_of_their_prompts(dtype, dims):
    """A token's few rows read the cache in place; a prompt's many rows read a packed copy."""
    q, k, v, batch = ragged_attention([7, 9, 25, 40], [7, 270, 33, 530], heads=(6, 2), dims=dims, dtype=dtype)
    q, k, v = (before_a_guard(x) for x in (q, k, v))
    rows, lens = batch.rows[batch.requests_of_tokens], (batch.positions + 1).int()
    decode = FlatBatch(torch.arange(batch.tokens + 1).int(), lens, rows, before_a_guard(batch.page_table))
    for window in (-1, 20):
        together, one_by_one = (flat_attention(q, k, v, b, scale=0.2, window=window) for b in (batch, decode))
        assert torch.equal(together, one_by_one), (together != one_by_one).flatten(1).any(1).nonzero()


@TYPES
def test_linear(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 130, generator=generator).to(dtype) / 11 for n in (100, 9))
    got, expected = packed_linear(x, pack(weight)), reference_linear(x, weight)
    torch.testing.assert_close(got, expected, rtol=max(tolerance, 1e-4), atol=max(tolerance, 1e-3))


@TYPES
def test_between_the_products(dtype, tolerance):
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).to(dtype) * 5
    weight, residual = x[0].clone(), x.flip(0)
    got = fused.add_rms_norm(x, residual.clone(), weight, 1e-5), fused.silu_mul(x)
    expected = plain(fused.add_rms_norm, x, residual, weight, 1e-5), plain(fused.silu_mul, x)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    special = torch.tensor([0.0, torch.nan, torch.inf, -1e30] * 8, dtype=dtype)[None]
    torch.testing.assert_close(fused.silu_mul(special), plain(fused.silu_mul, special), equal_nan=True)


def test_sampling():
    generator = torch.Generator().manual_seed(0)
    logits, keys = torch.randn(40, 700, generator=generator) * 3, torch.randint(2**62, (40,), generator=generator)
    rules = Rules(torch.full((40,), 0.8), torch.full((40,), 30), torch.full((40,), 0.9), torch.full((40,), 0.01))
    probs = target_probs(logits, rules)
    torch.testing.assert_close(probs, reference_target_probs(logits, *rules), rtol=1e-5, atol=1e-8)
    assert torch.equal(draw_tokens(logits, torch.arange(40), rules, keys), torch_gumbel_argmax(probs, keys))
