"""Attention of a flattened, ragged batch over a paged KV cache: extend, decode and verify in one path.

The batch is a row of N query tokens without padding; request r owns rows `qo_indptr[r]:qo_indptr[r + 1]`,
which are the last positions of its `kv_lens[r]` cached ones (FlashInfer's convention). A prefill chunk, a
decode step (one query) and a verification (1 .. gamma + 1 queries) differ in nothing but these two arrays.

Decode and verify reduce over the cache in chunks of fixed size and fixed order, so that in float32 the result
of a token does not depend on the other tokens of its batch: speculative and plain decoding see the same
numbers. The torch version has BLAS calls of one shape for that on the CPU, see `invariance`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from outrider.kernels.cpu import native
from outrider.kernels.cuda import native as cuda
from outrider.kernels.invariance import usable_places

QUERY_TILE = 4
"""Queries of one request that share a gather of its keys in the torch version."""
KV_CHUNK = 128
"""Positions of one reduction step; fixed, since the order of the sums depends on it."""
LONG_EXTEND = 64
"""From this many queries on, the torch version gives a request its own scaled-dot-product call."""
CUDA_HEADS = (64, 128)
"""Head sizes that the Triton kernel takes."""
MASKED = -1e30
"""Score of an unseen position: finite, so that a row that has seen nothing yet yields no NaN."""

BatchedProduct = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A batched matrix product."""


@dataclass(frozen=True)
class Tiles:
    """Up to `per_tile` neighbouring queries of one request, in order of falling `ends`.

    queries: [T, QUERY_TILE] int64, rows of q; the last query fills the places left over.
    positions: [T, QUERY_TILE] int64, their positions in the sequence.
    rows: [T] int64, rows of the page table.  kv_lens: [T] int64.
    ends: [T] int64, one past the last position any query of the tile sees.
    tokens: [M] int64, the queries covered; `places`: [M] int64, where each stands in `queries.flatten()`.
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

    def validate(self) -> None:
        """Raise ValueError where the arrays contradict each other; reads them on the host, once."""
        requests = self.requests
        if self.qo_indptr.shape != (requests + 1,) or self.rows.shape != (requests,):
            raise ValueError(
                f"for {requests} kv_lens expected {requests + 1} qo_indptr and {requests} rows, "
                f"got {tuple(self.qo_indptr.shape)} and {tuple(self.rows.shape)}"
            )
        if self.page_table.dim() != 2:
            raise ValueError(f"page_table must be [rows, context], got shape {tuple(self.page_table.shape)}")
        indptr, kv_lens = self.host_indptr, self.host_kv_lens
        if indptr[0] != 0:
            raise ValueError(f"qo_indptr must start at 0, got {indptr[0]}")
        for r, kv_len in enumerate(kv_lens):
            q_len = indptr[r + 1] - indptr[r]
            if not 0 <= q_len <= kv_len <= self.page_table.shape[1]:
                raise ValueError(
                    f"request {r}: expected 0 <= q_len <= kv_len <= context {self.page_table.shape[1]}, "
                    f"got q_len {q_len}, kv_len {kv_len}"
                )

    @cached_property
    def long_requests(self) -> list[int]:
        """Requests with at least `LONG_EXTEND` queries."""
        indptr = self.host_indptr
        return [r for r in range(self.requests) if indptr[r + 1] - indptr[r] >= LONG_EXTEND]

    def tiles(self, per_tile: int, *, causal: bool, long_too: bool) -> Tiles:
        """The batch, or what is left of it without its long requests, cut into tiles; made once per step."""
        key = per_tile, causal, long_too
        if key not in self._tiles:
            self._tiles[key] = _cut(self, *key)
        return self._tiles[key]

    @cached_property
    def _tiles(self) -> dict[tuple[int, bool, bool], Tiles]:
        return {}


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


def flat_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    batch: FlatBatch,
    *,
    scale: float,
    causal: bool = True,
    window: int = -1,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """Attend every query of a ragged batch to its request's cached keys and values.

    Parameters
    ----------
    q : [N, Hq, D]
    k_pool, v_pool : [S, Hkv, D] and [S, Hkv, Dv], the cache by slot; query head h reads KV head h // (Hq //
    Hkv).
    batch : which queries and slots belong together.
    scale : factor of the scores, usually D ** -0.5.
    causal : position i sees positions <= i; False: all of the request's `kv_lens`, as in a bidirectional
    draft block.
    window : position i sees positions >= i - window (FlashInfer's `window_left`, SGLang's
    `sliding_window_size`);
        -1: no lower limit.
    logit_cap : scores become cap * tanh(score / cap); 0: off.

    Returns
    -------
    [N, Hq, Dv] in q's dtype; sums in float32.
    """
    if q.shape[2] % 16 == 0 and v_pool.shape[2] % 16 == 0 and native.fits(q, k_pool, v_pool):
        arrays = (batch.qo_indptr, batch.kv_lens, batch.rows, batch.page_table)
        return torch.ops.outrider.flat_attention(q, k_pool, v_pool, *arrays, scale, causal, window, logit_cap)
    if q.shape[2] == v_pool.shape[2] in CUDA_HEADS and q.dtype == k_pool.dtype and cuda.fits(q, k_pool, v_pool):
        arrays = (batch.qo_indptr, batch.kv_lens, batch.rows, batch.page_table)
        most = batch.max_q_len if batch.most_queries is None else batch.most_queries
        return torch.ops.outrider_cuda.attention(q, k_pool, v_pool, *arrays, most, scale, causal, window, logit_cap)
    bounded = not q.is_cpu and batch.most_queries is not None and batch.longest is not None
    attention = bounded_attention if bounded else torch_attention
    return attention(q, k_pool, v_pool, batch, scale=scale, causal=causal, window=window, logit_cap=logit_cap)


def bounded_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    batch: FlatBatch,
    *,
    scale: float,
    causal: bool = True,
    window: int = -1,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """`flat_attention` on any device and without waiting for it, for a batch whose bounds are known.

    Online softmax over as many chunks as the bound of the cache asks for, of as many queries as that of the queries.
    Rows of q behind `qo_indptr` are padding, and what comes out for them is arbitrary.
    """
    most, longest = batch.most_queries, batch.longest
    if most is None or longest is None:
        raise ValueError("bounded attention needs a batch with most_queries and longest")
    requests, kv_heads, group = batch.requests, k_pool.shape[1], q.shape[1] // k_pool.shape[1]
    begins, kv_lens = batch.qo_indptr[:-1].long(), batch.kv_lens.long()
    q_lens = batch.qo_indptr.diff().long()
    columns = torch.arange(most, device=q.device)
    rows = (begins[:, None] + columns).clamp(max=len(q) - 1)
    position = (kv_lens - q_lens)[:, None] + columns  # [R, Q]
    queries = (q[rows].float() * scale).view(requests, most, kv_heads, group, -1).permute(0, 2, 1, 3, 4).flatten(2, 3)
    peak = queries.new_full((*queries.shape[:3], 1), MASKED)
    mass, out = torch.zeros_like(peak), queries.new_zeros(*queries.shape[:3], v_pool.shape[2])
    for start in range(0, longest, KV_CHUNK):
        span = torch.arange(start, start + KV_CHUNK, device=q.device)
        slots = batch.page_table[batch.rows[:, None], torch.minimum(span, kv_lens[:, None] - 1)].long()
        scores = queries @ k_pool[slots].float().permute(0, 2, 3, 1)
        if logit_cap > 0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        seen = (span < kv_lens[:, None, None]).expand(-1, most, -1)
        if causal:
            seen = seen & (span <= position[:, :, None])
        if window >= 0:
            seen = seen & (span >= position[:, :, None] - window)
        scores = scores.masked_fill(~seen[:, None].repeat_interleave(group, 2), MASKED)
        top = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights, decay = torch.exp(scores - top), torch.exp(peak - top)
        mass = mass * decay + weights.sum(-1, keepdim=True)
        out = out * decay + weights @ v_pool[slots].float().transpose(1, 2)
        peak = top
    out = (out / mass).view(requests, kv_heads, most, group, -1).permute(0, 2, 1, 3, 4).flatten(2, 3)
    place = torch.arange(len(q), device=q.device)
    request = torch.searchsorted(batch.qo_indptr[1:].long(), place, right=True).clamp(max=requests - 1)
    return out[request, (place - begins[request]).clamp(max=most - 1)].to(q.dtype)


def torch_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    batch: FlatBatch,
    *,
    scale: float,
    causal: bool = True,
    window: int = -1,
    logit_cap: float = 0.0,
    product: BatchedProduct = torch.bmm,
) -> torch.Tensor:
    """`flat_attention` without compiled kernels, on any device: no loop over tokens.

    In float32 on the CPU each tile has calls of its own, of one shape, to `product`, any BLAS; see `invariance`.
    """
    _check(q, k_pool, v_pool, batch)
    out = q.new_empty(q.shape[0], q.shape[1], v_pool.shape[2])
    per_tile, multiply = QUERY_TILE, torch.matmul
    if q.dtype == torch.float32 and q.device.type == "cpu":
        per_tile, multiply = _usable_queries(q, k_pool, v_pool, product), partial(_multiply_one_by_one, product)
    tiles = batch.tiles(per_tile, causal=causal, long_too=logit_cap > 0)
    if tiles.counts:
        out[tiles.tokens] = _tiled_attention(
            q, k_pool, v_pool, batch.page_table, tiles, scale, causal, window, logit_cap, multiply
        )
    for r in batch.long_requests if logit_cap <= 0 else ():
        start, stop = batch.host_indptr[r : r + 2]
        out[start:stop] = _request_attention(q[start:stop], k_pool, v_pool, batch, r, scale, causal, window)
    return out


def _check(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, batch: FlatBatch) -> None:
    if q.dim() != 3 or k_pool.dim() != 3 or v_pool.shape[:2] != k_pool.shape[:2]:
        raise ValueError(
            "expected q [N, Hq, D], k_pool [S, Hkv, D], v_pool [S, Hkv, Dv], got "
            f"{tuple(q.shape)}, {tuple(k_pool.shape)}, {tuple(v_pool.shape)}"
        )
    if q.shape[1] % k_pool.shape[1] or q.shape[2] != k_pool.shape[2]:
        raise ValueError(
            f"{q.shape[1]} query heads of {q.shape[2]} do not group "
            f"onto {k_pool.shape[1]} KV heads of {k_pool.shape[2]}"
        )
    if q.shape[0] != batch.tokens:
        raise ValueError(f"q has {q.shape[0]} rows, qo_indptr ends at {batch.tokens}")


def _usable_queries(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, product: BatchedProduct) -> int:
    """How many queries of a tile may differ, so that the bits of one do not depend on its place in the tile."""
    kv_heads, group = k_pool.shape[1], q.shape[1] // k_pool.shape[1]

    def usable(name: str, width: int, pool: torch.Tensor, order: tuple[int, int, int]) -> int:
        def multiply(tile: torch.Tensor) -> torch.Tensor:
            """[QUERY_TILE, Hkv, group, width] as `_tiled_attention` multiplies it."""
            cached = torch.randn(KV_CHUNK, *pool.shape[1:], generator=torch.Generator().manual_seed(1))
            rows = tile.transpose(0, 1).reshape(kv_heads, QUERY_TILE * group, width)
            return product(rows, cached.permute(order)).view(kv_heads, QUERY_TILE, group, -1).transpose(0, 1)

        shape = name, product, group, pool.shape[1:]
        return usable_places(shape, multiply, q.new_empty(QUERY_TILE, kv_heads, group, width))

    return min(usable("scores", q.shape[2], k_pool, (1, 2, 0)), usable("sums", KV_CHUNK, v_pool, (1, 0, 2)))


def _multiply_one_by_one(product: BatchedProduct, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[T, Hkv, M, K] times [T, Hkv, K, N]: [T, Hkv, M, N]."""
    return torch.stack([product(one, other) for one, other in zip(left, right, strict=True)])


def _tiled_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    tiles: Tiles,
    scale: float,
    causal: bool,
    window: int,
    logit_cap: float,
    multiply: BatchedProduct,
) -> torch.Tensor:
    """Online softmax over fixed chunks; tiles are sorted by length, so a chunk concerns a prefix of them."""
    count, kv_heads, group = tiles.rows.shape[0], k_pool.shape[1], q.shape[1] // k_pool.shape[1]
    width, head_dim, value_dim = QUERY_TILE * group, q.shape[2], v_pool.shape[2]
    queries = q[tiles.queries].float().view(count, QUERY_TILE, kv_heads, group, head_dim)
    queries = (queries * scale).transpose(1, 2).reshape(count, kv_heads, width, head_dim)
    peak = queries.new_full((count, kv_heads, width, 1), MASKED)
    mass = queries.new_zeros((count, kv_heads, width, 1))
    out = queries.new_zeros((count, kv_heads, width, value_dim))
    steps = torch.arange(KV_CHUNK, device=q.device)
    for chunk, active in enumerate(tiles.counts):
        span = steps + chunk * KV_CHUNK
        safe = torch.minimum(span, tiles.kv_lens[:active, None] - 1)
        slots = page_table[tiles.rows[:active, None], safe]
        keys, values = k_pool[slots].float(), v_pool[slots].float()
        scores = multiply(queries[:active], keys.permute(0, 2, 3, 1))
        if logit_cap > 0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        position = tiles.positions[:active, :, None]
        seen = span <= position if causal else (span < tiles.kv_lens[:active, None, None]).expand(-1, QUERY_TILE, -1)
        if window >= 0:
            seen = seen & (span >= position - window)
        seen = seen[:, None, :, None].expand(-1, -1, -1, group, -1).reshape(active, 1, width, KV_CHUNK)
        scores = scores.masked_fill(~seen, MASKED)
        top = torch.maximum(peak[:active], scores.amax(-1, keepdim=True))
        weights, decay = torch.exp(scores - top), torch.exp(peak[:active] - top)
        mass[:active] = mass[:active] * decay + weights.sum(-1, keepdim=True)
        out[:active] = out[:active] * decay + multiply(weights, values.transpose(1, 2))
        peak[:active] = top
    out = (out / mass).view(count, kv_heads, QUERY_TILE, group, value_dim).transpose(1, 2)
    return out.reshape(count * QUERY_TILE, q.shape[1], value_dim)[tiles.places].to(q.dtype)


def _request_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    batch: FlatBatch,
    request: int,
    scale: float,
    causal: bool,
    window: int,
) -> torch.Tensor:
    """A long extend of one request through torch's fused attention, which wants its keys contiguous."""
    length = batch.host_kv_lens[request]
    slots = batch.page_table[batch.rows[request], :length].long()
    i = torch.arange(length - q.shape[0], length, device=q.device)[:, None]
    j = torch.arange(length, device=q.device)
    mask = None
    if window >= 0 or (causal and q.shape[0] < length):
        mask = ((j <= i) | (not causal)) & ((j >= i - window) | (window < 0))
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k_pool[slots].transpose(0, 1)[None],
        v_pool[slots].transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def reference_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    batch: FlatBatch,
    *,
    scale: float,
    causal: bool = True,
    window: int = -1,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """What `flat_attention` means, one request at a time."""
    out = q.new_zeros(q.shape[0], q.shape[1], v_pool.shape[2])
    for r, (start, stop) in enumerate(zip(batch.host_indptr, batch.host_indptr[1:], strict=False)):
        length = batch.host_kv_lens[r]
        slots = batch.page_table[batch.rows[r], :length].long()
        group = q.shape[1] // k_pool.shape[1]
        keys, values = (pool[slots].float().repeat_interleave(group, 1) for pool in (k_pool, v_pool))
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].float(), keys) * scale
        scores = logit_cap * torch.tanh(scores / logit_cap) if logit_cap > 0 else scores
        i = torch.arange(length - (stop - start), length, device=q.device)[:, None]
        j = torch.arange(length, device=q.device)
        unseen = ((j > i) & causal) | ((j < i - window) & (window >= 0))
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out
