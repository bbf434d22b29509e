"""The random batches for the tests of this folder, and a decoder layer run on one."""

from __future__ import annotations

import torch

from outrider.kernels.layer import DecoderLayer, decoder_layer, reference_decoder_layer
from outrider.kernels.random_batches import alone, flattening, ragged_attention, some_rules, verification

__all__ = ["alone", "assert_same_layer", "flattening", "ragged_attention", "some_rules", "verification"]


def assert_same_layer(
    layer: DecoderLayer, dtype: torch.dtype, *, heads: tuple[int, int], width: int, hidden: int, first: bool
) -> None:
    """The layer in one call has the bits of its single operations: output, sum, and pools. first: it has no input x."""
    q, k_pool, v_pool, batch = ragged_attention([1, 5, 3], [60, 9, 130], heads=heads, dims=(width, width))
    slots = batch.page_table[batch.rows[batch.requests_of_tokens], batch.positions].long()
    cos_sin = torch.randn(200, width, generator=torch.Generator().manual_seed(1))
    rows = torch.randn(2, len(q), hidden, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = []
    for run in (decoder_layer, reference_decoder_layer):
        x, residual = rows.clone()
        pools = k_pool.to(dtype, copy=True), v_pool.to(dtype, copy=True)
        out = run(None if first else x, residual, layer, batch.positions, cos_sin, *pools, slots, batch)
        found.append((out, residual, *pools))
    assert found[0][0].dtype == dtype
    assert (found[0][2] != k_pool.to(dtype))[slots].any()  # keys were written
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)  # slots nobody owns hold NaN
