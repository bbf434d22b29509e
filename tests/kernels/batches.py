"""Random ragged batches for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.attention import FlatBatch


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
