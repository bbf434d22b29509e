"""Attention of a flattened, ragged batch over a paged KV cache: extend, decode and verify in one path.

Decode and verify reduce over the cache in chunks of fixed size and fixed order, so that in float32 the result
of a token does not depend on the other tokens of its batch: speculative and plain decoding see the same
numbers. The torch version has BLAS calls of one shape for that on the CPU, see `linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from .cpu import native
from .cuda import native as cuda
from .flat_batch import FlatBatch

MOST_CUDA_HEAD = 512
"""Numbers of a head at most that the Triton kernel takes: more do not fit a multiprocessor's shared memory."""
KV_CHUNK = 128
"""Positions of one reduction step; fixed, since the order of the sums depends on it."""
LONG_EXTEND = 64
"""Queries of a request from which on the torch version gathers its keys once for all of them."""
MASKED = -1e30
"""Score of an unseen position: finite, so that a row that has seen nothing yet yields no NaN."""

BatchedProduct = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A batched matrix product."""


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
    sinks : [Hq], the score of a further position whose value is 0, for each head (gpt-oss); None: there is none.

    Returns
    -------
    [N, Hq, Dv] in q's dtype; sums in float32.
    """
    if q.shape[2] % 16 == 0 and v_pool.shape[2] % 16 == 0 and native.fits(q, k_pool, v_pool):
        arrays = (batch.qo_indptr, batch.kv_lens, batch.rows, batch.page_table)
        sinks = None if sinks is None else sinks.float()
        return torch.ops.outrider.flat_attention(q, k_pool, v_pool, *arrays, scale, causal, window, logit_cap, sinks)
    if (
        sinks is None
        and q.shape[2] == v_pool.shape[2] <= MOST_CUDA_HEAD
        and q.dtype == k_pool.dtype
        and cuda.fits(q, k_pool, v_pool)
    ):
        arrays = (batch.qo_indptr, batch.kv_lens, batch.rows, batch.page_table)
        most = batch.max_q_len if batch.most_queries is None else batch.most_queries
        return torch.ops.outrider_cuda.attention(q, k_pool, v_pool, *arrays, most, scale, causal, window, logit_cap)
    bounded = not q.is_cpu and batch.most_queries is not None and batch.longest is not None
    attention = bounded_attention if bounded else torch_attention
    return attention(
        q, k_pool, v_pool, batch, scale=scale, causal=causal, window=window, logit_cap=logit_cap, sinks=sinks
    )


def bounded_attention(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, batch: FlatBatch, **options: Any
) -> torch.Tensor:
    """`flat_attention` on any device and without waiting for it, for a batch whose bounds are known.

    Rows of q behind `qo_indptr` are padding, and what comes out for them is arbitrary. options: `flat_attention`'s.
    """
    most, longest = batch.most_queries, batch.longest
    if most is None or longest is None:
        raise ValueError("bounded attention needs a batch with most_queries and longest")
    begins, kv_lens, columns = batch.qo_indptr[:-1].long(), batch.kv_lens.long(), torch.arange(most, device=q.device)
    queries = (begins[:, None] + columns).clamp(max=len(q) - 1)
    positions = (kv_lens - batch.qo_indptr.diff().long())[:, None] + columns
    blocks = _Blocks(queries, positions, batch.rows, kv_lens, longest)
    out = _attend(q, k_pool, v_pool, batch.page_table, blocks, multiply=torch.matmul, **options)
    place = torch.arange(len(q), device=q.device)
    request = torch.searchsorted(batch.qo_indptr[1:].long(), place, right=True).clamp(max=batch.requests - 1)
    return out[request, (place - begins[request]).clamp(max=most - 1)]


def torch_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    batch: FlatBatch,
    *,
    causal: bool = True,
    product: BatchedProduct = torch.bmm,
    **options: Any,
) -> torch.Tensor:
    """`flat_attention` without compiled kernels, on any device.

    The queries of a long extend share a gather of their keys; each other query has its own. In float32 on the CPU these
    have calls of their own, of one shape, to `product`, any BLAS; see `linear`. options: `flat_attention`'s others.
    """
    _check(q, k_pool, v_pool, batch)
    out = q.new_empty(q.shape[0], q.shape[1], v_pool.shape[2])
    long = batch.qo_indptr.diff() >= LONG_EXTEND
    for r in long.nonzero()[:, 0].tolist():
        own = torch.arange(*batch.host_indptr[r : r + 2], device=q.device)
        length = batch.kv_lens[r : r + 1].long()
        extend = _Blocks(own[None], batch.positions[own][None], batch.rows[r : r + 1], length, int(length))
        out[own] = _attend(
            q, k_pool, v_pool, batch.page_table, extend, causal=causal, multiply=torch.matmul, **options
        )[0]
    tokens = (~long)[batch.requests_of_tokens].nonzero()[:, 0]
    if not len(tokens):
        return out
    exact = q.dtype == torch.float32 and q.device.type == "cpu"
    request, positions = batch.requests_of_tokens[tokens], batch.positions[tokens]
    kv_lens = positions + 1 if causal else batch.kv_lens.long()[request]
    each = _Blocks(tokens[:, None], positions[:, None], batch.rows[request], kv_lens, int(kv_lens.max()))
    multiply = partial(_multiply_one_by_one, product) if exact else torch.matmul
    out[tokens] = _attend(q, k_pool, v_pool, batch.page_table, each, causal=causal, multiply=multiply, **options)[:, 0]
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


def _multiply_one_by_one(product: BatchedProduct, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[T, Hkv, M, K] times [T, Hkv, K, N]: [T, Hkv, M, N]; all left ones are aligned alike."""
    return torch.stack([product(one.clone(), other) for one, other in zip(left, right, strict=True)])


class _Blocks(NamedTuple):
    """R blocks of Q queries that see keys of one request each.

    queries, positions: [R, Q] int64, rows of q and their positions in the sequence. rows: [R], of the page table.
    kv_lens: [R] int64. longest: a bound of these.
    """

    queries: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    kv_lens: torch.Tensor
    longest: int


def _attend(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    blocks: _Blocks,
    *,
    multiply: BatchedProduct,
    scale: float,
    causal: bool = True,
    window: int = -1,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[R, Q, Hq, Dv], by an online softmax over fixed chunks. Those in which a query sees nothing do not change it."""
    (requests, most), kv_heads, group = blocks.queries.shape, k_pool.shape[1], q.shape[1] // k_pool.shape[1]
    queries = (q[blocks.queries].float() * scale).view(requests, most, kv_heads, group, -1)
    queries = queries.permute(0, 2, 1, 3, 4).flatten(2, 3)
    peak = queries.new_full((*queries.shape[:3], 1), MASKED)
    mass, out = torch.zeros_like(peak), queries.new_zeros(*queries.shape[:3], v_pool.shape[2])
    kv_lens, position = blocks.kv_lens[:, None], blocks.positions[:, :, None]
    for start in range(0, blocks.longest, KV_CHUNK):
        span = torch.arange(start, start + KV_CHUNK, device=q.device)
        slots = page_table[blocks.rows[:, None], torch.minimum(span, kv_lens - 1)].long()
        scores = _capped(multiply(queries, k_pool[slots].float().permute(0, 2, 3, 1)), logit_cap)
        seen = (span < kv_lens[:, None]).expand(-1, most, -1)
        if causal:
            seen = seen & (span <= position)
        if window >= 0:
            seen = seen & (span >= position - window)
        scores = scores.masked_fill(~seen[:, None].repeat_interleave(group, 2), MASKED)
        peak, mass, out = _add_chunk(scores, v_pool[slots].float(), peak, mass, out, multiply)
    mass = mass + _mass_of(sinks, kv_heads, most, peak)
    return (out / mass).view(requests, kv_heads, most, group, -1).permute(0, 2, 1, 3, 4).flatten(2, 3).to(q.dtype)


def _capped(scores: torch.Tensor, logit_cap: float) -> torch.Tensor:
    return logit_cap * torch.tanh(scores / logit_cap) if logit_cap > 0 else scores


def _mass_of(sinks: torch.Tensor | None, kv_heads: int, queries: int, peak: torch.Tensor) -> torch.Tensor | float:
    """The weights that sinks [Hq] add to the sums of rows (queries x group) whose largest scores are
    peak [T, Hkv, M, 1]."""
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
    """peak, mass [T, Hkv, M, 1] and out [T, Hkv, M, Dv] of an online softmax, with one more chunk of C positions.

    scores: [T, Hkv, M, C], `MASKED` where nothing is seen. values: [T, C, Hkv, Dv].
    """
    top = torch.maximum(peak, scores.amax(-1, keepdim=True))
    weights, decay = torch.exp(scores - top), torch.exp(peak - top)
    mass = mass * decay + weights.sum(-1, keepdim=True)
    return top, mass, out * decay + multiply(weights, values.transpose(1, 2))
