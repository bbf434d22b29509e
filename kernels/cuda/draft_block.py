"""One position of a draft block: Markov bias, the draw and q (DSpark, equation 4); see `drafters/block/sampling.py`.

The bias W2 latent is added to the base logits. The sums, R * V' float32, are written once to q's buffer, read by
`rules`, and overwritten by q if q is needed. W2 is read once for every 64 requests: 2 * r * V' bytes, which at r = 256
and 152 k tokens are 78 MB and most of a position's reads.
"""

import torch
import triton
import triton.language as tl

from .noise import BITS, BLOCK, CHUNK, NOBODY, chunks, exponential, least
from .rules import heat, kept, statistics, weight

COLUMNS = 64
"""Columns of one program of `bias_kernel`: 2376 programs for 152 k, eighteen for each of an H100's multiprocessors."""
DEPTH = 64
"""Elements of r in one product."""


@triton.jit(do_not_specialize=["requests", "width"])
def bias_kernel(
    logits, latent, w2, out, requests, width, rank, logits_stride, latent_stride, w2_stride, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program (rows, columns): logits + latent W2', in float32. Neighbours in rows share reads of W2 from L2."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there, inside = r < requests, column < width
    cells = r.to(tl.int64)[:, None] * logits_stride + column[None, :]
    mask = there[:, None] & inside[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    if HAS_BIAS:
        for first in range(0, rank, DEPTH):
            d = first + tl.arange(0, DEPTH)
            a = tl.load(
                latent + r[:, None] * latent_stride + d[None, :], mask=there[:, None] & (d < rank)[None, :], other=0.0
            )
            b = tl.load(
                w2 + column.to(tl.int64)[None, :] * w2_stride + d[:, None],
                mask=inside[None, :] & (d < rank)[:, None],
                other=0.0,
            )
            sums = tl.dot(a, b, sums, input_precision="ieee")
    sums += tl.load(logits + cells, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + r.to(tl.int64)[:, None] * out_stride + column[None, :], sums, mask=mask)


@triton.jit(do_not_specialize=["width", "chunks"], do_not_specialize_on_alignment=["keys"])
def sample_kernel(
    q, temperatures, unread, keys, tokens, most, norm, cut, last, scores, columns, width, stride, chunks,
    NAMED: tl.constexpr, WRITE: tl.constexpr, HAS_UNREAD: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the smallest E / q of its columns, and q in place of the logits."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature, greedy = heat(temperatures, row)
    writes = row >= 0
    if HAS_UNREAD:
        writes = tl.load(unread + row) == 0
    if WRITE == 0:
        writes = row < 0
    if greedy & (writes == 0):
        return
    at = q + row.to(tl.int64) * stride
    key, largest, scale = tl.load(keys + row), tl.load(most + row), tl.load(norm + row)
    edge, tie = tl.load(cut + row), tl.load(last + row)
    best = tl.full([BLOCK], float("inf"), tl.float64)
    place = tl.full([BLOCK], 2**31 - 1, tl.int32)
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, width), BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        logit = tl.load(at + column, mask=inside, other=float("-inf"))
        w = tl.where(inside, kept(weight(logit, largest, temperature), column, edge, tie), 0.0)
        tl.store(at + column, w / scale, mask=inside & writes)
        if greedy == 0:
            token = column.to(tl.int64)
            if NAMED:
                token = tl.load(tokens + column, mask=inside, other=0)
            score = tl.where(w > 0, exponential(key, token) / w.to(tl.float64), float("inf"))
            place = tl.where(score < best, column, place)
            best = tl.minimum(best, score)
    score, column = least(best, place)
    tl.store(scores + row * chunks + chunk, score)
    tl.store(columns + row * chunks + chunk, column)


@triton.jit(do_not_specialize=["chunks"])
def chosen_kernel(
    temperatures, tokens, norm, best, scores, columns, drawn, sure, chunks, NAMED: tl.constexpr, CHUNKS: tl.constexpr
):
    """Program r: request r's token, and the largest of its q, which is 1 / norm."""
    row, i = tl.program_id(0), tl.arange(0, CHUNKS)
    _, greedy = heat(temperatures, row)
    found = tl.load(scores + row * chunks + i, mask=i < chunks, other=float("inf"))
    _, column = least(found, tl.load(columns + row * chunks + i, mask=i < chunks, other=0))
    column = tl.where(greedy | (column == NOBODY), tl.load(best + row), column).to(tl.int64)
    if NAMED:
        column = tl.load(tokens + column)
    tl.store(drawn + row, column)
    tl.store(sure + row, 1.0 / tl.load(norm + row))


def draft_step(
    q: torch.Tensor, logits: torch.Tensor, latent: torch.Tensor | None, w2: torch.Tensor | None,
    temperatures: torch.Tensor, top_ks: torch.Tensor | None, top_ps: torch.Tensor | None, min_ps: torch.Tensor | None,
    keys: torch.Tensor, vocab: torch.Tensor | None, wants_probs: bool, unread: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return tokens [R] int64 and the largest of each q [R]; write q [R, V'] float32 on demand, except for rows that
    are `unread` [R] bool."""
    requests, width = logits.shape
    parts = chunks(width)
    drawn = torch.empty(requests, dtype=torch.int64, device=logits.device)
    sure = torch.empty(requests, dtype=torch.float32, device=logits.device)
    if not requests:
        return drawn, sure
    rows = min(64, max(16, triton.next_power_of_2(requests)))
    a, b = (logits, logits) if latent is None or w2 is None else (latent.to(w2.dtype), w2)
    bias_kernel[(triton.cdiv(requests, rows), triton.cdiv(width, COLUMNS))](
        logits, a, b, q, requests, width, a.shape[1], logits.stride(0), a.stride(0), b.stride(0), q.stride(0),
        ROWS=rows, COLUMNS=COLUMNS, DEPTH=DEPTH, HAS_BIAS=latent is not None, num_warps=4, num_stages=3,
    )  # fmt: skip
    found = statistics(q, temperatures, top_ks, top_ps, min_ps)
    scores = torch.empty((requests, parts), dtype=torch.float64, device=logits.device)
    columns = torch.empty((requests, parts), dtype=torch.int32, device=logits.device)
    tokens, named = drawn if vocab is None else vocab, vocab is not None
    sample_kernel[(requests, parts)](
        q, temperatures, temperatures if unread is None else unread, keys.contiguous(), tokens, found.most, found.norm,
        found.cut, found.last, scores, columns, width, q.stride(0), parts, NAMED=named, WRITE=wants_probs,
        HAS_UNREAD=unread is not None, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=8, **BITS,
    )  # fmt: skip
    chosen_kernel[(requests,)](
        temperatures, tokens, found.norm, found.best, scores, columns, drawn, sure, parts, NAMED=named,
        CHUNKS=max(2, triton.next_power_of_2(parts)), num_warps=1,
    )  # fmt: skip
    return drawn, sure
