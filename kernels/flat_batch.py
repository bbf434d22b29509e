"""A flattened, ragged batch over a paged KV cache: which queries belong to which request, and how they form tiles.

The batch is a row of N query tokens without padding. Request r owns rows `qo_indptr[r]:qo_indptr[r + 1]`, which are the
last positions of its `kv_lens[r]` cached ones (FlashInfer's convention). A prefill chunk, a decode step (one query) and
a verification (1 .. gamma + 1 queries) differ only in these two arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

QUERY_TILE = 4
"""Queries of one request that share a gather of its keys in the torch version."""
KV_CHUNK = 128
"""Positions of one reduction step; fixed, since the order of the sums depends on it."""
LONG_EXTEND = 64
"""Queries from which the torch version gives a request its own scaled-dot-product call."""


@dataclass(frozen=True)
class Tiles:
    """Up to `per_tile` neighbouring queries of one request, in order of falling `ends`.

    queries: [T, QUERY_TILE] int64, rows of q; the last query fills the places left over.
    positions: [T, QUERY_TILE] int64, their positions in the sequence.
    rows: [T] int64, rows of the page table. kv_lens: [T] int64.
    ends: [T] int64, one past the last position any query of the tile sees.
    tokens: [M] int64, the queries covered. places: [M] int64, the index of each in `queries.flatten()`.
    counts: for every chunk of `KV_CHUNK` positions, how many of the first tiles reach into it.
    """

    queries: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    kv_lens: torch.Tensor
    ends: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    counts: list[int]


@dataclass(frozen=True)
class FlatBatch:
    """R requests with N queries in one row; built once per step, and all layers share its derived values.

    qo_indptr: [R + 1] int32, rows `qo_indptr[r]:qo_indptr[r + 1]` of the queries belong to request r.
    kv_lens: [R] int32, positions in the cache, including the queries' own (their keys are already written).
    rows: [R] int64, each request's row of `page_table`.
    page_table: [rows, context] int32, the KV slot of every position; entries at or beyond `kv_lens` are not read.
    most_queries, longest: upper bounds of a request's queries and of `kv_lens`, where the host knows them. On a device
        it then need not wait for these lengths.
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

    @cached_property
    def long_requests(self) -> list[int]:
        """Requests with at least `LONG_EXTEND` queries."""
        indptr = self.host_indptr
        return [r for r in range(self.requests) if indptr[r + 1] - indptr[r] >= LONG_EXTEND]

    def chunked(self, size: int) -> FlatBatch:
        """Return the batch in which queries see no position before their own chunk of `size` (Llama 4). It has a
        request for each chunk with queries, with the chunk's part of the page table. Causal; made once per step."""
        if self.max_kv_len <= size:
            return self
        if size not in self._chunked:
            self._chunked[size] = _by_chunks(self, size)
        return self._chunked[size]

    @cached_property
    def _chunked(self) -> dict[int, FlatBatch]:
        return {}

    def tiles(self, per_tile: int, *, causal: bool, long_too: bool) -> Tiles:
        """Return the batch, or its part without long requests, cut into tiles; made once per step."""
        key = per_tile, causal, long_too
        if key not in self._tiles:
            self._tiles[key] = _cut(self, *key)
        return self._tiles[key]

    @cached_property
    def _tiles(self) -> dict[tuple[int, bool, bool], Tiles]:
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


def _cut(batch: FlatBatch, per_tile: int, causal: bool, long_too: bool) -> Tiles:
    q_lens = batch.qo_indptr.diff().long()
    tiled = q_lens if long_too else q_lens.where(q_lens < LONG_EXTEND, 0)
    per_request = (tiled + per_tile - 1) // per_tile
    request = torch.repeat_interleave(torch.arange(batch.requests, device=q_lens.device), per_request)
    first_tile = per_request.cumsum(0) - per_request
    index = torch.arange(request.shape[0], device=q_lens.device)
    steps = torch.arange(QUERY_TILE, device=q_lens.device).clamp(max=per_tile - 1)
    offset = (index - first_tile[request])[:, None] * per_tile + steps
    clamped = torch.minimum(offset, q_lens[request, None] - 1)
    queries = batch.qo_indptr[:-1].long()[request, None] + clamped
    kv_lens = batch.kv_lens.long()[request]
    positions = (kv_lens - q_lens[request])[:, None] + clamped
    ends = positions[:, -1] + 1 if causal else kv_lens
    ends, order = ends.sort(descending=True, stable=True)
    place = torch.empty_like(order)
    place[order] = index
    tokens = (tiled > 0)[batch.requests_of_tokens].nonzero()[:, 0]
    owner = batch.requests_of_tokens[tokens]
    within = tokens - batch.qo_indptr.long()[owner]
    places = place[first_tile[owner] + within // per_tile] * QUERY_TILE + within % per_tile
    starts = torch.arange(0, batch.max_kv_len, KV_CHUNK, device=q_lens.device)
    counts = [count for count in (ends[None, :] > starts[:, None]).sum(1).tolist() if count]
    rows = batch.rows[request[order]]
    return Tiles(queries[order], positions[order], rows, kv_lens[order], ends, tokens, places, counts)
