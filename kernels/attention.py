"""Attention of a flattened, ragged batch over a paged KV cache: extend, decode and verify in one path.

Decode and verify reduce over the cache in chunks of fixed size and fixed order. So in float32 the result of a token
does not depend on the other tokens of its batch: speculative and plain decoding see the same numbers. On the CPU the
torch version uses BLAS calls of one shape for that, see `linear`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from .cpu import native
from .cuda import native as cuda
from .flat_batch import KV_CHUNK, QUERY_TILE, FlatBatch, Tiles
from .linear import usable_places

MOST_CUDA_HEAD = 512
"""Largest head size of the Triton kernel: more does not fit a multiprocessor's shared memory."""
MASKED = -1e30
"""Score of an unseen position: finite, so that a row without a seen position yields no NaN."""

BatchedProduct = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A batched matrix product."""


class Scores(NamedTuple):
    """Options of the scores and the positions seen, as in `flat_attention`."""

    scale: float
    causal: bool = True
    window: int = -1
    logit_cap: float = 0.0
    sinks: torch.Tensor | None = None


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
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend every query of a ragged batch to its request's cached keys and values.

    Parameters
    ----------
    q : [N, Hq, D]
    k_pool, v_pool : [S, Hkv, D] and [S, Hkv, Dv], the cache by slot; query head h reads KV head h // (Hq // Hkv).
    batch : which queries and slots belong together. scale : factor of the scores, usually D ** -0.5.
    causal : position i sees positions <= i; False: all of the request's `kv_lens`, as in a bidirectional draft block.
    window : position i sees positions >= i - window (FlashInfer's `window_left`, SGLang's `sliding_window_size`); -1:
        no lower limit.
    logit_cap : scores become cap * tanh(score / cap); 0: off.
    sinks : [Hq], for each head the score of one more position, with value 0 (gpt-oss); None: there is none.

    Returns
    -------
    [N, Hq, Dv] in q's dtype; sums in float32.
    """
    arrays = batch.qo_indptr, batch.kv_lens, batch.rows, batch.page_table
    if q.shape[2] % 16 == 0 and v_pool.shape[2] % 16 == 0 and native.fits(q, k_pool, v_pool):
        sinks = None if sinks is None else sinks.float()
        return torch.ops.outrider.flat_attention(q, k_pool, v_pool, *arrays, scale, causal, window, logit_cap, sinks)
    if (
        sinks is None
        and q.shape[2] == v_pool.shape[2] <= MOST_CUDA_HEAD
        and q.dtype == k_pool.dtype
        and cuda.fits(q, k_pool, v_pool)
    ):
        most = batch.max_q_len if batch.most_queries is None else batch.most_queries
        return cuda.attention.attention(q, k_pool, v_pool, *arrays, most, scale, causal, window, logit_cap)
    bounded = not q.is_cpu and batch.most_queries is not None and batch.longest is not None
    attention = bounded_attention if bounded else torch_attention
    return attention(q, k_pool, v_pool, batch, Scores(scale, causal, window, logit_cap, sinks))


def bounded_attention(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, batch: FlatBatch, how: Scores
) -> torch.Tensor:
    """Do `flat_attention` on any device without waiting for it, for a batch with known bounds.

    Online softmax over as many chunks, of as many queries, as the batch's bounds allow. Rows of q after `qo_indptr` are
    padding, with arbitrary results.
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
    queries = (q[rows].float() * how.scale).view(requests, most, kv_heads, group, -1).permute(0, 2, 1, 3, 4)
    queries = queries.flatten(2, 3)
    peak = queries.new_full((*queries.shape[:3], 1), MASKED)
    mass, out = torch.zeros_like(peak), queries.new_zeros(*queries.shape[:3], v_pool.shape[2])
    for start in range(0, longest, KV_CHUNK):
        span = torch.arange(start, start + KV_CHUNK, device=q.device)
        slots = batch.page_table[batch.rows[:, None], torch.minimum(span, kv_lens[:, None] - 1)].long()
        scores = _capped(queries @ k_pool[slots].float().permute(0, 2, 3, 1), how.logit_cap)
        seen = (span < kv_lens[:, None, None]).expand(-1, most, -1)
        if how.causal:
            seen = seen & (span <= position[:, :, None])
        if how.window >= 0:
            seen = seen & (span >= position[:, :, None] - how.window)
        scores = scores.masked_fill(~seen[:, None].repeat_interleave(group, 2), MASKED)
        peak, mass, out = _add_chunk(scores, v_pool[slots].float(), peak, mass, out, torch.matmul)
    mass = mass + _mass_of(how.sinks, kv_heads, most, peak)
    out = (out / mass).view(requests, kv_heads, most, group, -1).permute(0, 2, 1, 3, 4).flatten(2, 3)
    place = torch.arange(len(q), device=q.device)
    request = torch.searchsorted(batch.qo_indptr[1:].long(), place, right=True).clamp(max=requests - 1)
    return out[request, (place - begins[request]).clamp(max=most - 1)].to(q.dtype)


def torch_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    batch: FlatBatch,
    how: Scores,
    product: BatchedProduct = torch.bmm,
) -> torch.Tensor:
    """Do `flat_attention` without compiled kernels, on any device and without a loop over tokens. In float32 on the CPU
    each tile makes its own calls, all of one shape, to `product`, any BLAS; see `linear`."""
    _check(q, k_pool, v_pool, batch)
    out = q.new_empty(q.shape[0], q.shape[1], v_pool.shape[2])
    per_tile, multiply = QUERY_TILE, torch.matmul
    if q.dtype == torch.float32 and q.device.type == "cpu":
        per_tile, multiply = _usable_queries(q, k_pool, v_pool, product), partial(_multiply_one_by_one, product)
    special = how.logit_cap > 0 or how.sinks is not None  # torch's fused attention has neither
    tiles = batch.tiles(per_tile, causal=how.causal, long_too=special)
    if tiles.counts:
        out[tiles.tokens] = _tiled_attention(q, k_pool, v_pool, batch.page_table, tiles, how, multiply)
    for r in () if special else batch.long_requests:
        start, stop = batch.host_indptr[r : r + 2]
        out[start:stop] = _request_attention(q[start:stop], k_pool, v_pool, batch, r, how)
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
    """Return how many queries of a tile have bits that do not depend on their place in the tile."""
    kv_heads, group = k_pool.shape[1], q.shape[1] // k_pool.shape[1]

    def usable(name: str, width: int, pool: torch.Tensor, order: tuple[int, int, int]) -> int:
        def multiply(tile: torch.Tensor) -> torch.Tensor:
            """Return [QUERY_TILE, Hkv, group, width], multiplied as in `_tiled_attention`."""
            cached = torch.randn(KV_CHUNK, *pool.shape[1:], generator=torch.Generator().manual_seed(1))
            rows = tile.transpose(0, 1).reshape(kv_heads, QUERY_TILE * group, width)
            return product(rows, cached.permute(order)).view(kv_heads, QUERY_TILE, group, -1).transpose(0, 1)

        shape = name, product, group, pool.shape[1:]
        return usable_places(shape, multiply, q.new_empty(QUERY_TILE, kv_heads, group, width))

    return min(usable("scores", q.shape[2], k_pool, (1, 2, 0)), usable("sums", KV_CHUNK, v_pool, (1, 0, 2)))


def _multiply_one_by_one(product: BatchedProduct, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return [T, Hkv, M, K] times [T, Hkv, K, N]: [T, Hkv, M, N]."""
    return torch.stack([product(a, b) for a, b in zip(left, right, strict=True)])


def _tiled_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    tiles: Tiles,
    how: Scores,
    multiply: BatchedProduct,
) -> torch.Tensor:
    """Attend by online softmax over fixed chunks; tiles are sorted by length, so a chunk concerns a prefix of them."""
    count, kv_heads, group = tiles.rows.shape[0], k_pool.shape[1], q.shape[1] // k_pool.shape[1]
    width, head_dim, value_dim = QUERY_TILE * group, q.shape[2], v_pool.shape[2]
    queries = q[tiles.queries].float().view(count, QUERY_TILE, kv_heads, group, head_dim)
    queries = (queries * how.scale).transpose(1, 2).reshape(count, kv_heads, width, head_dim)
    peak = queries.new_full((count, kv_heads, width, 1), MASKED)
    mass = queries.new_zeros((count, kv_heads, width, 1))
    out = queries.new_zeros((count, kv_heads, width, value_dim))
    steps = torch.arange(KV_CHUNK, device=q.device)
    for chunk, active in enumerate(tiles.counts):
        span = steps + chunk * KV_CHUNK
        safe = torch.minimum(span, tiles.kv_lens[:active, None] - 1)
        slots = page_table[tiles.rows[:active, None], safe]
        keys, values = k_pool[slots].float(), v_pool[slots].float()
        scores = _capped(multiply(queries[:active], keys.permute(0, 2, 3, 1)), how.logit_cap)
        position = tiles.positions[:active, :, None]
        inside = (span < tiles.kv_lens[:active, None, None]).expand(-1, QUERY_TILE, -1)
        seen = span <= position if how.causal else inside
        if how.window >= 0:
            seen = seen & (span >= position - how.window)
        seen = seen[:, None, :, None].expand(-1, -1, -1, group, -1).reshape(active, 1, width, KV_CHUNK)
        scores = scores.masked_fill(~seen, MASKED)
        before = peak[:active], mass[:active], out[:active]
        peak[:active], mass[:active], out[:active] = _add_chunk(scores, values, *before, multiply)
    mass = mass + _mass_of(how.sinks, kv_heads, QUERY_TILE, peak)
    out = (out / mass).view(count, kv_heads, QUERY_TILE, group, value_dim).transpose(1, 2)
    return out.reshape(count * QUERY_TILE, q.shape[1], value_dim)[tiles.places].to(q.dtype)


def _capped(scores: torch.Tensor, logit_cap: float) -> torch.Tensor:
    return logit_cap * torch.tanh(scores / logit_cap) if logit_cap > 0 else scores


def _mass_of(sinks: torch.Tensor | None, kv_heads: int, queries: int, peak: torch.Tensor) -> torch.Tensor | float:
    """Return the weights that sinks [Hq] add to the sums of rows (queries x group) with largest scores peak [T, Hkv, M,
    1]."""
    if sinks is None:
        return 0.0
    rows = sinks.float().view(kv_heads, 1, -1).expand(-1, queries, -1).reshape(kv_heads, -1, 1)
    return torch.exp(rows - peak)


def _add_chunk(
    scores: torch.Tensor,
    values: torch.Tensor,
    peak: torch.Tensor,
    mass: torch.Tensor,
    out: torch.Tensor,
    multiply: BatchedProduct,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return peak, mass [T, Hkv, M, 1] and out [T, Hkv, M, Dv] of an online softmax after one more chunk of C
    positions.

    scores: [T, Hkv, M, C], `MASKED` at unseen positions. values: [T, C, Hkv, Dv].
    """
    top = torch.maximum(peak, scores.amax(-1, keepdim=True))
    weights, decay = torch.exp(scores - top), torch.exp(peak - top)
    mass = mass * decay + weights.sum(-1, keepdim=True)
    return top, mass, out * decay + multiply(weights, values.transpose(1, 2))


def _request_attention(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, batch: FlatBatch, request: int, how: Scores
) -> torch.Tensor:
    """Run a long extend of one request through torch's fused attention, which needs contiguous keys."""
    length = batch.host_kv_lens[request]
    slots = batch.page_table[batch.rows[request], :length].long()
    i = torch.arange(length - q.shape[0], length, device=q.device)[:, None]
    j = torch.arange(length, device=q.device)
    mask = None
    if how.window >= 0 or (how.causal and q.shape[0] < length):
        mask = ((j <= i) | (not how.causal)) & ((j >= i - how.window) | (how.window < 0))
    query, keys, values = (x.transpose(0, 1)[None] for x in (q, k_pool[slots], v_pool[slots]))
    fused = how.causal and mask is None
    out = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=fused, scale=how.scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)
