"""Random ragged batches for the tests of this folder, and a decoder layer run on one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.flat_batch import FlatBatch
from outrider.kernels.layer import DecoderLayer, decoder_layer, reference_decoder_layer
from outrider.kernels.sampling import Rules


def ragged_attention(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: tuple[int, int] = (9, 3),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, FlatBatch]:
    """q, k_pool, v_pool and a batch whose slots are scattered; unused page-table entries point outside the
    pool."""
    generator = torch.Generator().manual_seed(seed)
    requests, slots = len(q_lens), sum(kv_lens) + 16
    free = torch.randperm(slots, generator=generator).int().split([*kv_lens, 16])
    page_table = torch.full((requests + 3, max(kv_lens) + 5), 2**30, dtype=torch.int32)
    rows = torch.randperm(requests + 3, generator=generator)[:requests]
    for row, owned in zip(rows, free, strict=False):
        page_table[row, : len(owned)] = owned
    qo_indptr = torch.tensor([0, *q_lens]).cumsum(0).int()
    batch = FlatBatch(qo_indptr, torch.tensor(kv_lens).int(), rows, page_table)
    batch.validate()
    q, k_pool, v_pool = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in (
            (sum(q_lens), heads[0], dims[0]),
            (slots, heads[1], dims[0]),
            (slots, heads[1], dims[1]),
        )
    )
    k_pool[free[-1].long()] = v_pool[free[-1].long()] = torch.nan
    return q, k_pool, v_pool, batch


def alone(batch: FlatBatch, token: int) -> FlatBatch:
    """The batch in which query `token` is decoded by itself."""
    row = batch.rows[batch.requests_of_tokens[token], None]
    return FlatBatch(torch.tensor([0, 1]).int(), batch.positions[token, None].int() + 1, row, batch.page_table)


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


def some_rules(rows: int, width: int, generator: torch.Generator) -> Rules:
    """Requests of every kind: greedy, unfiltered, each filter alone, all of them, and filters that keep all or one."""

    def choose(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]

    return Rules(
        choose([0.0, 0.7, 1.0, 1.0, 1.3]),
        choose([2**30, 2**30, 1, 2, 7, width]),
        choose([1.0, 1.0, 0.9, 0.5, 0.0, 0.99]),
        choose([0.0, 0.0, 0.05, 0.3, 1.0]),
    )
