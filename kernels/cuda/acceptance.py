"""Acceptance, residual and bonus from the target's logits; p is never stored. See `outrider.kernels.acceptance`.

Five launches. Two, of `rules`, compute statistics of each row's p in the only pass over the T * V logits. The third
reads one logit per draft token to compute the scale of p after it; in token-by-token verification the scale is 1 while
drafts are kept, then 0. The fourth draws from the row of each request's last token (all rows of seeded requests). The
fifth writes the results. In total T * V logits are read, then R * V logits and R * V numbers of q, and 24 bytes are
written for 8192 of these. Storing p would write T * V numbers and filter them in place.

In block verification a launch before the fourth sums max(0, scale * p - q) in the rows between a request's first and
last that have a scale between 0 and 1: at most another pass over logits and q.
"""

import torch
import triton
import triton.language as tl

from .noise import BITS, BLOCK, CHUNK, NOBODY, chunks, exponential, least
from .rules import heat, kept, statistics, weight


@triton.jit(do_not_specialize=["gamma"])
def scales_kernel(
    logits, qo_indptr, verify_lens, temperatures, decided, points, most, norm, cut, last, tokens, uniforms, draft_probs,
    vocab, scales, gamma, draft_width, draft_stride, row_stride, HAS_Q: tl.constexpr, HAS_POINTS: tl.constexpr,
    HAS_VOCAB: tl.constexpr, BY_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program r: the scales [WIDTH] of request r after 0, 1, ... of its draft tokens, up to the last verified one."""
    r, k = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    start, length = tl.load(qo_indptr + r), tl.load(verify_lens + r).to(tl.int32)
    temperature, greedy = heat(temperatures, r)
    if greedy | (tl.load(decided + r) != 0):
        return
    verified = k < length
    row = start + k
    token = tl.load(tokens + r * gamma + k, mask=verified, other=0)
    logit = tl.load(logits + row * row_stride + token, mask=verified, other=0.0).to(tl.float32)
    w = weight(logit, tl.load(most + row, mask=verified, other=0.0), temperature)
    w = kept(w, token, tl.load(cut + row, mask=verified, other=0), tl.load(last + row, mask=verified, other=0))
    p = (w / tl.load(norm + row, mask=verified, other=1.0)).to(tl.float64)
    q = tl.full([WIDTH], 1.0, tl.float32)
    if HAS_Q:
        column = token
        there = verified
        if HAS_VOCAB:
            low, high = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32) + draft_width
            for _ in range(20):  # bisect for the first column without a smaller token; 20 steps suffice below 2**20
                middle = (low + high) // 2
                smaller = tl.load(vocab + middle, mask=low < high, other=2**62) < token
                high = tl.where((low < high) & (smaller == 0), middle, high)
                low = tl.where((low < high) & smaller, middle + 1, low)
            there = verified & (low < draft_width)
            there = there & (tl.load(vocab + low, mask=there, other=-1) == token)
            column = low.to(tl.int64)
        if HAS_POINTS:
            there = there & (tl.load(points + r) == 0)
        q = tl.load(draft_probs + r * draft_stride + k * draft_width + column, mask=there, other=0.0)
        if HAS_POINTS:
            q = tl.where(tl.load(points + r) != 0, 1.0, q)
    if BY_BLOCK:
        scale = temperature * 0.0 + 1.0
        found = tl.full([WIDTH], 1.0, tl.float32)
        for i in range(length):
            joint = scale.to(tl.float64) * tl.sum(tl.where(k == i, p, 0.0), 0)
            drafted = tl.sum(tl.where(k == i, q, 0.0), 0).to(tl.float64)
            below = joint / tl.where(joint < drafted, drafted, tl.where(joint > 0, joint, 1.0))
            scale = tl.where(joint > 0, below, 0.0).to(tl.float32)
            found = tl.where(k == i + 1, scale, found)
    else:
        chance = tl.load(uniforms + r * gamma + k, mask=verified, other=1.0) * q.to(tl.float64)
        found = tl.where(k <= tl.min(tl.where(verified & (chance >= p), k, length), 0), 1.0, 0.0)
    tl.store(scales + r * WIDTH + k, found, mask=k <= length)


@triton.jit
def left_over(
    w, norm, scale, token, inside, drafted, is_point, at_q, columns, HAS_Q: tl.constexpr, HAS_VOCAB: tl.constexpr
):
    """max(0, scale * p - q) of tokens, float32; q at `at_q`, or a point mass on the `drafted` token."""
    q = tl.where(token == drafted, 1.0, 0.0)
    if HAS_Q:
        column = token
        there = inside & (is_point == 0)
        if HAS_VOCAB:
            column = tl.load(columns + token, mask=there, other=-1)
        q = tl.where(is_point, q, tl.load(at_q + column, mask=there & (column >= 0), other=0.0))
    rest = scale.to(tl.float64) * (w / norm).to(tl.float64) - q.to(tl.float64)
    return tl.maximum(rest, 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["requests", "gamma", "width", "chunks"])
def mass_kernel(
    logits, request, qo_indptr, verify_lens, temperatures, decided, points, most, norm, cut, last, tokens, draft_probs,
    columns, scales, masses, requests, gamma, width, draft_width, draft_stride, row_stride, chunks,
    HAS_POINTS: tl.constexpr, HAS_VOCAB: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the sum of the residual, rounded to multiples of 2^-44 so that further sums are exact."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(qo_indptr + requests):
        return
    r = tl.load(request + row)
    step, length = (row - tl.load(qo_indptr + r)).to(tl.int32), tl.load(verify_lens + r).to(tl.int32)
    temperature, greedy = heat(temperatures, r)
    if greedy | (tl.load(decided + r) != 0) | (step < 1) | (step >= length):
        return
    scale = tl.load(scales + r * WIDTH + step)
    if (scale == 0) | (scale == 1):
        return
    at, at_q = logits + row.to(tl.int64) * row_stride, draft_probs + r * draft_stride + step * draft_width
    drafted, is_point = tl.load(tokens + r * gamma + step), step < 0
    if HAS_POINTS:
        is_point = tl.load(points + r) != 0
    largest, total, edge, tie = tl.load(most + row), tl.load(norm + row), tl.load(cut + row), tl.load(last + row)
    mass = tl.zeros([BLOCK], tl.float64)
    for first in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, width), BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < width
        logit = tl.load(at + token, mask=inside, other=float("-inf")).to(tl.float32)
        w = tl.where(inside, kept(weight(logit, largest, temperature), token, edge, tie), 0.0)
        rest = left_over(w, total, scale, token, inside, drafted, is_point, at_q, columns, True, HAS_VOCAB)
        mass += (rest.to(tl.float64) + 256.0) - 256.0
    tl.store(masses + row * chunks + chunk, tl.sum(mass, 0))


@triton.jit
def kept_drafts(
    scales, uniforms, masses, r, start, length, gamma, chunks, BY_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Number of draft tokens kept of request r, and the scale of p after them."""
    k, i = tl.arange(0, WIDTH), tl.arange(0, CHUNKS)
    scale = tl.load(scales + r * WIDTH + k, mask=k <= length, other=0.0)
    passed = scale == 1
    if BY_BLOCK:
        exact = scale.to(tl.float64)
        chance = tl.load(uniforms + r * gamma + k - 1, mask=(k > 0) & (k <= length), other=1.0)
        within = (k < length) & (scale > 0) & (scale < 1)
        cells = ((start + k) * chunks)[:, None] + i[None, :]
        left = tl.sum(tl.load(masses + cells, mask=within[:, None] & (i < chunks)[None, :], other=0.0), 1)
        passed = passed | (within & (chance * (left + (1 - exact)) < left)) | ((k == length) & (chance < exact))
    number = tl.max(tl.where(passed, k, 0), 0)
    return number, tl.sum(tl.where(k == number, scale, 0.0), 0)


@triton.jit(do_not_specialize=["requests", "gamma", "width", "chunks"])
def final_kernel(
    logits, request, qo_indptr, verify_lens, temperatures, decided, points, most, norm, cut, last, tokens, uniforms,
    final_keys, row_keys, draft_probs, columns, scales, masses, scores, found, requests, gamma, width, draft_width,
    draft_stride, row_stride, chunks, HAS_ROW_KEYS: tl.constexpr, HAS_Q: tl.constexpr, HAS_POINTS: tl.constexpr,
    HAS_VOCAB: tl.constexpr, BY_BLOCK: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the chunk's best token by p, and by the residual if a draft was rejected in this row."""
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
    rejected, scale = step < 0, temperature * 0.0 + 1.0
    if tl.load(decided + r) != 0:
        if HAS_ROW_KEYS:
            key = tl.load(row_keys + row)
    else:
        accepted, scale = kept_drafts(
            scales, uniforms, masses, r, start, length, gamma, chunks, BY_BLOCK, WIDTH, CHUNKS
        )
        rejected = (accepted == step) & (step < length)
        if accepted != step:
            step = step * 0 - 1
    if step < 0:
        return
    at = logits + row.to(tl.int64) * row_stride
    largest, total, edge, tie = tl.load(most + row), tl.load(norm + row), tl.load(cut + row), tl.load(last + row)
    at_q, is_point = draft_probs + r * draft_stride + step * draft_width, step < 0
    if HAS_POINTS:
        is_point = tl.load(points + r) != 0
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
            rest = left_over(w, total, scale, token, inside, drafted, is_point, at_q, columns, HAS_Q, HAS_VOCAB)
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


@triton.jit(do_not_specialize=["gamma", "chunks"])
def outcome_kernel(
    qo_indptr, verify_lens, temperatures, decided, best, tokens, uniforms, scales, masses, scores, found, accept_lens,
    out, gamma, chunks, BY_BLOCK: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program r: request r's tokens. Reads 24 bytes a chunk of its rows, writes 8 * (gamma + 2)."""
    r, k, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH), tl.arange(0, CHUNKS)
    start, length = tl.load(qo_indptr + r), tl.load(verify_lens + r).to(tl.int32)
    _temperature, greedy = heat(temperatures, r)
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
        accepted = tl.min(tl.where((k < length) & (drafted != wanted), k, length), 0)
        final = tl.sum(tl.where(k == accepted, wanted, 0), 0)
    else:
        accepted, _scale = kept_drafts(
            scales, uniforms, masses, r, start, length, gamma, chunks, BY_BLOCK, WIDTH, CHUNKS
        )
        cells = ((start + accepted) * chunks + i) * 2
        none = float("inf")
        _, final = least(
            tl.load(scores + cells, mask=i < chunks, other=none), tl.load(found + cells, mask=i < chunks, other=0)
        )
        rest = tl.load(scores + cells + 1, mask=i < chunks, other=none)
        _, replacement = least(rest, tl.load(found + cells + 1, mask=i < chunks, other=0))
        final = tl.where(replacement < NOBODY, replacement, final)  # where p - q vanishes by rounding: p
    token = tl.where(k < accepted, drafted, tl.where(k == accepted, final.to(tl.int64), 0))
    tl.store(out + r * (gamma + 1) + k, token, mask=k <= gamma)
    tl.store(accept_lens + r, (accepted + 1).to(tl.int64))


def accept(
    tokens: torch.Tensor, verify_lens: torch.Tensor, qo_indptr: torch.Tensor, request: torch.Tensor,
    logits: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor | None, top_ps: torch.Tensor | None,
    min_ps: torch.Tensor | None, uniforms: torch.Tensor, final_keys: torch.Tensor, row_keys: torch.Tensor | None,
    decided: torch.Tensor, draft_probs: torch.Tensor | None, vocab: torch.Tensor | None, points: torch.Tensor | None,
    by_block: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
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
    by_block = by_block and draft_probs is not None
    drafted = {"HAS_VOCAB": vocab is not None, "WIDTH": max(2, triton.next_power_of_2(gamma + 1))}
    outcome = {"BY_BLOCK": by_block, "WIDTH": drafted["WIDTH"], "CHUNKS": max(2, triton.next_power_of_2(parts))}
    pointed = {"HAS_POINTS": points is not None}
    given = {"HAS_Q": draft_probs is not None, "BY_BLOCK": by_block} | drafted | pointed
    strides = (1, 1) if draft_probs is None else (draft_probs.shape[2], q.stride(0))
    row_numbers = found.most, found.norm, found.cut, found.last
    scales = torch.empty((requests, drafted["WIDTH"]), dtype=torch.float32, device=logits.device)
    masses = torch.empty((rows, parts), dtype=torch.float64, device=logits.device) if by_block else uniforms
    asked = verify_lens, temperatures, decided
    alike = *asked, decided if points is None else points, *row_numbers, tokens  # three kernels read these
    sizes = gamma, width, *strides, logits.stride(0), parts
    scales_kernel[(requests,)](
        logits, qo_indptr, *alike, uniforms, q, named, scales, gamma, *strides, logits.stride(0), **given,
        num_warps=1, **BITS,
    )  # fmt: skip
    if by_block:
        mass_kernel[(rows, parts)](
            logits, request, qo_indptr, *alike, q, columns, scales, masses, requests, *sizes, **drafted, **pointed,
            CHUNK=CHUNK, BLOCK=BLOCK, num_warps=8, **BITS,
        )  # fmt: skip
    final_kernel[(rows, parts)](
        logits, request, qo_indptr, *alike, uniforms, final_keys, final_keys if row_keys is None else row_keys, q,
        columns, scales, masses, scores, best, requests, *sizes, HAS_ROW_KEYS=row_keys is not None, **given,
        CHUNKS=outcome["CHUNKS"], CHUNK=CHUNK, BLOCK=BLOCK, num_warps=8, **BITS,
    )  # fmt: skip
    outcome_kernel[(requests,)](
        qo_indptr, *asked, found.best, tokens, uniforms, scales, masses, scores, best, lens, out, gamma, parts,
        **outcome, num_warps=1, **BITS,
    )  # fmt: skip
    return lens, out


def _columns(vocab: torch.Tensor, width: int) -> torch.Tensor:
    """Return [V] int32, the column of each of the target's tokens in q; -1: the drafter lacks it."""
    numbers = torch.arange(len(vocab), dtype=torch.int32, device=vocab.device)
    return torch.full((width,), -1, dtype=torch.int32, device=vocab.device).scatter_(0, vocab, numbers)
