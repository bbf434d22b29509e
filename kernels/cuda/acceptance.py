"""Acceptance, residual and bonus from the target's logits; p is never stored. See `outrider.kernels.acceptance`.

Four launches. `rules` says in two what each row's p is, which is the one pass over the T * V logits. The third draws
from the row of each request that its last token comes from (from all rows of seeded requests); every program works the
acceptance tests out again, since a test reads one logit. The fourth says what came of it. So T * V logits are read,
then R * V logits and R * V numbers of q, and 24 bytes are written for 8192 of these. Storing p would write T * V
numbers, and filter them in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .noise import BITS, BLOCK, CHUNK, NOBODY, chunks, exponential, least
from .rules import heat, kept, statistics, weight


@triton.jit
def tests(
    logits, row_stride, start, length, temperature, most, norm, cut, last, tokens, uniforms, draft_probs, vocab, r,
    gamma, draft_width, HAS_Q: tl.constexpr, HAS_VOCAB: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Number of request r's first `length` draft tokens that are kept: x while u * q(x) < p(x)."""
    k = tl.arange(0, WIDTH)
    verified = k < length
    row = start + k
    token = tl.load(tokens + r * gamma + k, mask=verified, other=0)
    logit = tl.load(logits + row * row_stride + token, mask=verified, other=0.0).to(tl.float32)
    w = weight(logit, tl.load(most + row, mask=verified, other=0.0), temperature)
    w = kept(w, token, tl.load(cut + row, mask=verified, other=0), tl.load(last + row, mask=verified, other=0))
    p = w / tl.load(norm + row, mask=verified, other=1.0)
    q = tl.full([WIDTH], 1.0, tl.float32)
    if HAS_Q:
        column = token
        there = verified
        if HAS_VOCAB:
            low, high = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32) + draft_width
            for _ in range(20):  # the first column whose token is not smaller, of at most 2**20 - 1
                middle = (low + high) // 2
                smaller = tl.load(vocab + middle, mask=low < high, other=2**62) < token
                high = tl.where((low < high) & (smaller == 0), middle, high)
                low = tl.where((low < high) & smaller, middle + 1, low)
            there = verified & (low < draft_width)
            there = there & (tl.load(vocab + low, mask=there, other=-1) == token)
            column = low.to(tl.int64)
        q = tl.load(draft_probs + (r * gamma + k) * draft_width + column, mask=there, other=0.0)
    chance = tl.load(uniforms + r * gamma + k, mask=verified, other=1.0) * q.to(tl.float64)
    keep = chance < p.to(tl.float64)
    return tl.min(tl.where(verified & (keep == 0), k, length), 0)


@triton.jit(do_not_specialize=["requests", "gamma", "width", "chunks"])
def final_kernel(
    logits, request, qo_indptr, verify_lens, temperatures, decided, most, norm, cut, last, tokens, uniforms, final_keys,
    row_keys, draft_probs, vocab, columns, scores, found, requests, gamma, width, draft_width, row_stride, chunks,
    HAS_ROW_KEYS: tl.constexpr, HAS_Q: tl.constexpr, HAS_VOCAB: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the best of the chunk by p, and by max(0, p - q) where a draft token was rejected here."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(qo_indptr + requests):
        return
    r = tl.load(request + row)
    start, length = tl.load(qo_indptr + r), tl.load(verify_lens + r).to(tl.int32)
    temperature, greedy = heat(temperatures, r)
    if greedy:
        return
    step = (row - start).to(tl.int32)
    key = tl.load(final_keys + r)
    rejected = step < 0
    if tl.load(decided + r) != 0:
        if HAS_ROW_KEYS:
            key = tl.load(row_keys + row)
    else:
        accepted = tests(
            logits, row_stride, start, length, temperature, most, norm, cut, last, tokens, uniforms, draft_probs, vocab,
            r, gamma, draft_width, HAS_Q, HAS_VOCAB, WIDTH,
        )  # fmt: skip
        rejected = (accepted == step) & (step < length)
        if accepted != step:
            step = step * 0 - 1
    if step < 0:
        return
    at = logits + row.to(tl.int64) * row_stride
    largest, scale, edge, tie = tl.load(most + row), tl.load(norm + row), tl.load(cut + row), tl.load(last + row)
    drafted = tl.load(tokens + r * gamma + step, mask=rejected, other=-1)
    best, rest_best = tl.full([BLOCK], float("inf"), tl.float64), tl.full([BLOCK], float("inf"), tl.float64)
    place, rest_place = tl.full([BLOCK], 2**31 - 1, tl.int32), tl.full([BLOCK], 2**31 - 1, tl.int32)
    for first in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, width), BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < width
        logit = tl.load(at + token, mask=inside, other=float("-inf")).to(tl.float32)
        w = tl.where(inside, kept(weight(logit, largest, temperature), token, edge, tie), 0.0)
        noise = exponential(key, token.to(tl.int64))
        score = tl.where(w > 0, noise / w.to(tl.float64), float("inf"))
        place = tl.where(score < best, token, place)
        best = tl.minimum(best, score)
        if rejected:
            if HAS_Q:
                column = token
                if HAS_VOCAB:
                    column = tl.load(columns + token, mask=inside, other=-1)
                at_q = draft_probs + (r * gamma + step) * draft_width
                q = tl.load(at_q + column, mask=inside & (column >= 0), other=0.0)
            else:
                q = tl.where(token == drafted, 1.0, 0.0)
            rest = w / scale - q
            score = tl.where(rest > 0, noise / rest.to(tl.float64), float("inf"))
            rest_place = tl.where(score < rest_best, token, rest_place)
            rest_best = tl.minimum(rest_best, score)
    at_chunk = (row * chunks + chunk) * 2
    score, token = least(best, place)
    tl.store(scores + at_chunk, score)
    tl.store(found + at_chunk, token)
    score, token = least(rest_best, rest_place)
    tl.store(scores + at_chunk + 1, score)
    tl.store(found + at_chunk + 1, token)


@triton.jit(do_not_specialize=["gamma", "width", "chunks"])
def outcome_kernel(
    logits, qo_indptr, verify_lens, temperatures, decided, most, norm, cut, last, best, tokens, uniforms, draft_probs,
    vocab, scores, found, accept_lens, out, gamma, width, draft_width, row_stride, chunks, HAS_Q: tl.constexpr,
    HAS_VOCAB: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program r: request r's tokens. Reads 24 bytes a chunk of its rows, writes 8 * (gamma + 2)."""
    r, k, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH), tl.arange(0, CHUNKS)
    start, length = tl.load(qo_indptr + r), tl.load(verify_lens + r).to(tl.int32)
    temperature, greedy = heat(temperatures, r)
    drafted = tl.load(tokens + r * gamma + k, mask=k < length, other=-1)
    if greedy | (tl.load(decided + r) != 0):
        wanted = tl.load(best + start + k, mask=k <= length, other=0)
        if greedy == 0:
            cells = (((start + k) * chunks)[:, None] + i[None, :]) * 2
            there = (k <= length)[:, None] & (i < chunks)[None, :]
            each = tl.load(scores + cells, mask=there, other=float("inf"))
            named = tl.load(found + cells, mask=there, other=2**31 - 1)
            smallest = tl.min(each, 1)
            wanted = tl.min(tl.where((each == smallest[:, None]) & there, named, NOBODY), 1)
        kept_drafts = tl.min(tl.where((k < length) & (drafted != wanted), k, length), 0)
        final = tl.sum(tl.where(k == kept_drafts, wanted, 0), 0)
    else:
        kept_drafts = tests(
            logits, row_stride, start, length, temperature, most, norm, cut, last, tokens, uniforms, draft_probs, vocab,
            r, gamma, draft_width, HAS_Q, HAS_VOCAB, WIDTH,
        )  # fmt: skip
        cells = ((start + kept_drafts) * chunks + i) * 2
        none = float("inf")
        _, final = least(
            tl.load(scores + cells, mask=i < chunks, other=none), tl.load(found + cells, mask=i < chunks, other=0)
        )
        rest = tl.load(scores + cells + 1, mask=i < chunks, other=none)
        _, replacement = least(rest, tl.load(found + cells + 1, mask=i < chunks, other=0))
        final = tl.where(replacement < NOBODY, replacement, final)  # where p - q vanishes by rounding: p
    token = tl.where(k < kept_drafts, drafted, tl.where(k == kept_drafts, final.to(tl.int64), 0))
    tl.store(out + r * (gamma + 1) + k, token, mask=k <= gamma)
    tl.store(accept_lens + r, (kept_drafts + 1).to(tl.int64))


@torch.library.custom_op("outrider_cuda::accept", mutates_args=())
def accept(
    tokens: torch.Tensor,
    verify_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    request: torch.Tensor,
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    min_ps: torch.Tensor | None,
    uniforms: torch.Tensor,
    final_keys: torch.Tensor,
    row_keys: torch.Tensor | None,
    decided: torch.Tensor,
    draft_probs: torch.Tensor | None,
    vocab: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    (requests, gamma), (rows, width) = tokens.shape, logits.shape
    lens, out = torch.empty_like(final_keys), tokens.new_empty(requests, gamma + 1)
    if not requests:
        return lens, out
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    found = statistics(logits, temperatures, top_ks, top_ps, min_ps, request, qo_indptr.narrow(0, requests, 1))
    parts = chunks(width)
    scores = torch.empty((rows, parts, 2), dtype=torch.float64, device=logits.device)
    best = torch.empty((rows, parts, 2), dtype=torch.int32, device=logits.device)
    q = final_keys if draft_probs is None else draft_probs.contiguous()
    named, columns = tokens, tokens
    if vocab is not None:
        named, columns = vocab, _columns(vocab, width)
    tokens, uniforms = tokens.contiguous(), uniforms.contiguous()
    sizes = gamma, width, 1 if draft_probs is None else draft_probs.shape[2], logits.stride(0), parts
    shapes = {
        "HAS_Q": draft_probs is not None,
        "HAS_VOCAB": vocab is not None,
        "WIDTH": max(2, triton.next_power_of_2(gamma + 1)),
    }
    row_numbers = found.most, found.norm, found.cut, found.last
    final_kernel[(rows, parts)](
        logits, request, qo_indptr, verify_lens, temperatures, decided, *row_numbers, tokens, uniforms, final_keys,
        final_keys if row_keys is None else row_keys, q, named, columns, scores, best, requests, *sizes,
        HAS_ROW_KEYS=row_keys is not None, **shapes, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=8, **BITS,
    )  # fmt: skip
    outcome_kernel[(requests,)](
        logits, qo_indptr, verify_lens, temperatures, decided, *row_numbers, found.best, tokens, uniforms, q, named,
        scores, best, lens, out, *sizes, **shapes, CHUNKS=max(2, triton.next_power_of_2(parts)), num_warps=1, **BITS,
    )  # fmt: skip
    return lens, out


def _columns(vocab: torch.Tensor, width: int) -> torch.Tensor:
    """[V] int32, the column of each of the target's tokens in q; -1: the drafter lacks it."""
    numbers = torch.arange(len(vocab), dtype=torch.int32, device=vocab.device)
    return torch.full((width,), -1, dtype=torch.int32, device=vocab.device).scatter_(0, vocab, numbers)


@accept.register_fake
def _(tokens: torch.Tensor, *others: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    requests, gamma = tokens.shape
    return tokens.new_empty(requests), tokens.new_empty(requests, gamma + 1)
