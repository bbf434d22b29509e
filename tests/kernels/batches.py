"""The random batches for the tests of this folder, and a decoder run on them."""

from __future__ import annotations

import torch

from outrider.kernels.decoder import Decoder, DecoderLayer, reference_forward
from outrider.kernels.random_batches import alone, flattening, ragged_attention, some_rules, verification

__all__ = ["alone", "assert_same_bits", "flattening", "ragged_attention", "some_rules", "verification"]


def assert_same_bits(layers: list[DecoderLayer], dtype: torch.dtype, batches: dict[str, tuple]) -> None:
    """A decoder of these layers has the bits of its single operations: states, kept sums, residual and pools.

    batches: queries and cached positions of each request, by name. Widths are multiples of 32, keys' and values' alike.
    """
    qkv, out = layers[0].weights[:2]
    hidden, heads = qkv.depth, (out.depth // 32, (qkv.outputs - out.depth) // 64)
    norm, cos_sin = torch.linspace(0.5, 2, hidden).to(dtype), torch.randn(1200, 32)
    for name, (q_lens, kv_lens) in batches.items():
        _, k_pool, v_pool, batch = ragged_attention(q_lens, kv_lens, heads=heads, dims=(32, 32))
        slots = batch.page_table[batch.rows[batch.requests_of_tokens], batch.positions].long()
        x = torch.randn(batch.tokens, hidden).to(dtype)
        captures = [([], True)] if len(layers) < 3 else [([], True), ([1], False), ([1, 2], True)]
        for captured, causal in captures:
            found = []
            for run in (Decoder.forward, reference_forward):
                pools = [(k_pool.to(dtype, copy=True), v_pool.to(dtype, copy=True)) for _ in layers]
                decoder, residual = Decoder(layers, pools, norm, cos_sin), x.clone()
                normed, kept = run(decoder, residual, batch.positions, slots, batch, captured, causal)
                found.append((normed, kept, residual, *(pool for pair in pools for pool in pair)))
            assert found[0][1].shape == (batch.tokens, len(captured), hidden)
            for got, expected in zip(*found, strict=True):
                assert got.dtype == dtype
                same = (got == expected) | (got.isnan() & expected.isnan())  # slots nobody owns hold NaN
                assert same.all(), f"{name}, captured {captured}, causal {causal}"
