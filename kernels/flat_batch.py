"""A flattened, ragged batch over a paged KV cache: whose queries lie where.

The batch is a row of N query tokens without padding; request r owns rows `qo_indptr[r]:qo_indptr[r + 1]`,
which are the last positions of its `kv_lens[r]` cached ones (FlashInfer's convention). A prefill chunk, a
decode step (one query) and a verification (1 .. gamma + 1 queries) differ in nothing but these two arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class FlatBatch:
    """R requests with N queries in one row; build one per step, all layers share what it derives.

    qo_indptr: [R + 1] int32, rows `qo_indptr[r]:qo_indptr[r + 1]` of the queries belong to request r.
    kv_lens: [R] int32, positions in the cache, the queries' own included (their keys are already written).
    rows: [R] int64, each request's row of `page_table`.
    page_table: [rows, context] int32, the KV slot of every position; entries at or beyond `kv_lens` are not
    read.
    most_queries, longest: bounds of a request's queries and of `kv_lens`, where the host knows them. On a device it
    then need not wait for these lengths.
    """

    qo_indptr: torch.Tensor
    kv_lens: torch.Tensor
    rows: torch.Tensor
    page_table: torch.Tensor
    most_queries: int | None = None
    longest: int | None = None

    @property
    def requests(self) -> int:
        return self.kv_lens.shape[0]

    @cached_property
    def host_indptr(self) -> list[int]:
        return self.qo_indptr.tolist()

    @cached_property
    def host_kv_lens(self) -> list[int]:
        return self.kv_lens.tolist()

    @property
    def tokens(self) -> int:
        return self.host_indptr[-1]

    @cached_property
    def max_kv_len(self) -> int:
        return max(self.host_kv_lens, default=0)

    @cached_property
    def max_q_len(self) -> int:
        pairs = zip(self.host_indptr, self.host_indptr[1:], strict=False)
        return max((stop - start for start, stop in pairs), default=0)

    @cached_property
    def requests_of_tokens(self) -> torch.Tensor:
        """[N] int64, the request of every query."""
        lens = self.qo_indptr.diff().long()
        return torch.repeat_interleave(torch.arange(self.requests, device=lens.device), lens)

    @cached_property
    def positions(self) -> torch.Tensor:
        """[N] int64, the position of every query in its sequence."""
        owner = self.requests_of_tokens
        first = (self.kv_lens - self.qo_indptr[1:]).long()
        return torch.arange(owner.shape[0], device=owner.device) + first[owner]

    def chunked(self, size: int) -> FlatBatch:
        """The batch whose queries see no position before their own chunk of `size` (Llama 4): a request for each chunk
        that has queries, with the part of the page table that is the chunk's. Causal; made once per step."""
        if self.max_kv_len <= size:
            return self
        if size not in self._chunked:
            self._chunked[size] = _by_chunks(self, size)
        return self._chunked[size]

    @cached_property
    def _chunked(self) -> dict[int, FlatBatch]:
        return {}


def _by_chunks(batch: FlatBatch, size: int) -> FlatBatch:
    queries, lens, parts = [0], list[int](), list[torch.Tensor]()
    for row, kv_len, begin, end in zip(
        batch.rows.tolist(), batch.host_kv_lens, batch.host_indptr, batch.host_indptr[1:], strict=False
    ):
        position = kv_len - (end - begin)
        while position < kv_len:
            start = position // size * size
            stop = min(kv_len, start + size)
            queries.append(queries[-1] + stop - position)
            lens.append(stop - start)
            parts.append(batch.page_table[row, start:stop])
            position = stop
    table = batch.page_table.new_zeros(len(parts), max(lens))
    for part, row in zip(parts, table, strict=True):
        row[: len(part)] = part
    return FlatBatch(
        qo_indptr=torch.tensor(queries, dtype=torch.int32, device=table.device),
        kv_lens=torch.tensor(lens, dtype=torch.int32, device=table.device),
        rows=torch.arange(len(parts), device=table.device),
        page_table=table,
    )
