"""The target's distribution from logits without storing it: four numbers a row determine every probability.

With m the row's largest logit and w = exp((logit - m) / temperature), the rules of `outrider.kernels.sampling` keep the
tokens with w above `cut`, and tokens up to `last` with w equal to `cut`. Kept tokens have p = w / norm, all other
tokens 0. w is compared by its bits, which have the order of the numbers for non-negative float32.

The one pass over a row also notes the largest logit of every SPAN columns. These bound the cut from below, and spans
that lie below the bound are not read again: with top-k 20 about twenty of a thousand spans are.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .noise import BLOCK, CHUNK, chunks

PIVOTS = 8
"""Cuts tried in one pass over a row: three bits of 30."""
SPAN = 128
"""Columns of a span; its largest logit is stored: 4 bytes for every 256 or 512 read."""
COARSE = tl.constexpr(1 << 16)
"""Bits to which the k-th largest span is found: a 128th of w."""
SURE = tl.constexpr(1e-4)
"""Least 1 - top_p from which `bound` uses top-p; below it, rounding could drop a token that stays."""
WARPS = 16
"""Warps that search one row: two numbers of a block per thread, with counts and sums in registers."""
ONE = tl.constexpr(0x3F800000)  # the bits of 1.0, the largest w


class Rows(NamedTuple):
    """Result of `statistics` for T rows: [T] each."""

    most: torch.Tensor
    norm: torch.Tensor
    cut: torch.Tensor
    last: torch.Tensor
    best: torch.Tensor


@triton.jit
def weight(logit, most, temperature):
    """w of float32 logits; 0 for one that is masked out."""
    return tl.exp((logit - most) / temperature)


@triton.jit
def kept(w, token, cut, last):
    """w where the rules keep the token, else 0."""
    bits = w.to(tl.int32, bitcast=True)
    return tl.where((bits > cut) | ((bits == cut) & (token <= last)), w, 0.0)


@triton.jit
def heat(temperatures, request):
    """(temperature to divide by, greedy) of a request; a greedy one's distribution is that of temperature 1."""
    temperature = tl.load(temperatures + request)
    return tl.where(temperature > 0, temperature, 1.0), temperature <= 0


@triton.jit(do_not_specialize=["width", "chunks"], do_not_specialize_on_alignment=["total"])
def chunk_kernel(
    logits, request, total, temperatures, most, sums, best, tops, width, row_stride, chunks,
    HAS_REQUEST: tl.constexpr, HAS_TOTAL: tl.constexpr, HAS_TOPS: tl.constexpr, SPAN: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): largest logit, its first token, and the sum of w relative to it; with tops the largest
    logit of each span. The only pass over all logits."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if HAS_TOTAL:
        if row >= tl.load(total):
            return
    owner = row
    if HAS_REQUEST:
        owner = tl.load(request + row).to(tl.int32)
    temperature, _ = heat(temperatures, owner)
    at = logits + row.to(tl.int64) * row_stride
    running = tl.full([BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, width), BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(at + column, mask=column < width, other=float("-inf")).to(tl.float32)
        if HAS_TOPS:
            span = tl.max(tl.reshape(logit, [BLOCK // SPAN, SPAN]), 1)
            first = row.to(tl.int64) * (chunks * (CHUNK // SPAN)) + start // SPAN
            tl.store(tops + first + tl.arange(0, BLOCK // SPAN), span)
        larger = tl.maximum(running, logit)
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        mass = mass * weight(running, safe, temperature) + weight(logit, safe, temperature)
        place = tl.where(logit > running, column, place)
        running = larger
    largest = tl.max(running, 0)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(most + row * chunks + chunk, largest)
    tl.store(sums + row * chunks + chunk, tl.sum(mass * weight(running, safe, temperature), 0))
    tl.store(best + row * chunks + chunk, tl.min(tl.where(running == largest, place, width), 0))


@triton.jit
def columns_of(spans, start, count, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """Columns [BLOCK] of the listed spans from the `start`-th on; 2**30 after the list's end."""
    place = start + tl.arange(0, BLOCK // SPAN)
    span = tl.load(spans + place, mask=place < count, other=2**30 // SPAN)
    return tl.reshape(span[:, None] * SPAN + tl.arange(0, SPAN)[None, :], [BLOCK])


@triton.jit
def above(
    at, spans, listed, width, most, temperature, low, step, PIVOTS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Count of w above each of the bits low, low + step, ..., and their sums: int32 and float32 [PIVOTS]."""
    cuts = low + step * tl.arange(0, PIVOTS)
    count = tl.zeros([BLOCK, PIVOTS], tl.int32)
    mass = tl.zeros([BLOCK, PIVOTS], tl.float32)
    for start in range(0, listed, BLOCK // SPAN):
        column = columns_of(spans, start, listed, SPAN, BLOCK)
        logit = tl.load(at + column, mask=column < width, other=float("-inf")).to(tl.float32)
        w = tl.where(column < width, weight(logit, most, temperature), 0.0)
        larger = w.to(tl.int32, bitcast=True)[:, None] > cuts[None, :]
        larger = larger & (column < width)[:, None]
        count += larger.to(tl.int32)
        mass += tl.where(larger, w[:, None], 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def nth_tie(at, spans, listed, width, most, temperature, cut, n, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """Return the n-th token with w equal to the bits `cut`."""
    seen, found = n * 0, n * 0 + width
    start = n * 0
    while start < listed:
        column = columns_of(spans, start, listed, SPAN, BLOCK)
        logit = tl.load(at + column, mask=column < width, other=float("-inf")).to(tl.float32)
        w = weight(logit, most, temperature)
        tied = ((w.to(tl.int32, bitcast=True) == cut) & (column < width)).to(tl.int32)
        number = seen + tl.cumsum(tied, 0)
        found = tl.minimum(found, tl.min(tl.where((tied > 0) & (number == n), column, width), 0))
        seen += tl.sum(tied, 0)
        start = tl.where(seen >= n, listed, start + BLOCK // SPAN)
    return found


@triton.jit
def list_spans(spans, tops, low, SPANS: tl.constexpr):
    """Write the numbers of the spans that have a w above the bits `low`, ascending, to `spans`; how many there are."""
    there = tops > low
    tl.debug_barrier()  # the list before has been read
    tl.store(spans + tl.cumsum(there.to(tl.int32), 0) - 1, tl.arange(0, SPANS), mask=there)
    tl.debug_barrier()
    return tl.sum(there.to(tl.int32), 0)


@triton.jit
def bound(tops, width, total, top_k, top_p, min_p):
    """Return bits below the cut, the highest of three bounds: top_k spans lie above, so at least top_k tokens; less
    mass than top_p leaves out lies at or below; min_p drops all tokens at or below."""
    low = tl.where(min_p > 0, min_p.to(tl.int32, bitcast=True) - 1, -1)
    outside = tl.where((top_p < 1) & (1 - top_p >= SURE), 0.5 * (1 - top_p) * total / width, 0.0)
    low = tl.maximum(low, outside.to(tl.int32, bitcast=True) - 1)
    if tl.sum((tops >= 0).to(tl.int32), 0) >= top_k:
        below, beyond = low * 0 - 1, low * 0 + ONE
        while beyond - below > COARSE:
            middle = below + (beyond - below) // 2
            enough = tl.sum((tops > middle).to(tl.int32), 0) >= top_k
            below, beyond = tl.where(enough, middle, below), tl.where(enough, beyond, middle)
        low = tl.maximum(low, below)
    return low


@triton.jit
def search(
    at, spans, tops, width, most, temperature, total, top_k, top_p, min_p, PIVOTS: tl.constexpr, SPAN: tl.constexpr,
    SPANS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(cut, last, norm) of a row by its rules. tops: [SPANS] bits of each span's largest w, -1 where there is no span.

    A token is kept while fewer than top_k tokens, and at most the mass top_p, come before it. The search narrows
    (low, high] to one number or equal numbers: at `high` the next token would still be kept, at `low` not. It reads
    spans that reach above `low`.
    """
    mass_limit = tl.where(top_p < 1, top_p * total, float("inf"))
    low = bound(tops, width, total, top_k, top_p, min_p)
    listed = list_spans(spans, tops, low, SPANS)
    high = low * 0 + ONE + 1  # above every w, so that there is a first pass
    few, light = low * 0, total * 0.0  # tokens above `high`, and their mass
    many, heavy = low * 0 + width, total  # above `low`
    lane = tl.arange(0, PIVOTS)
    while high - low > 1:
        step = tl.maximum((high - low) // PIVOTS, 1)
        counts, masses = above(at, spans, listed, width, most, temperature, low, step, PIVOTS, SPAN, BLOCK)
        stays = (counts < top_k) & (masses <= mass_limit)
        stays = stays | (low + step * lane >= high)
        first = tl.min(tl.where(stays, lane, PIVOTS), 0)
        before = tl.maximum(first - 1, 0)
        many = tl.sum(tl.where(lane == before, counts, 0), 0)
        heavy = tl.sum(tl.where(lane == before, masses, 0.0), 0)
        inside = (first < PIVOTS) & (low + step * first < high)
        few = tl.where(inside, tl.sum(tl.where(lane == first, counts, 0), 0), few)
        light = tl.where(inside, tl.sum(tl.where(lane == first, masses, 0.0), 0), light)
        new_low = low + step * before
        new_high = tl.where(inside, low + step * first, high)
        # All above `low` stay (its own next one would, too), or one is left between, which stays.
        done = (first == 0) | (many - few <= 1)
        low, high = new_low, tl.where(done, new_low, new_high)
        if (high - low > 1) & (listed > BLOCK // SPAN):
            listed = list_spans(spans, tops, low, SPANS)
    cut, last, norm = low, width, heavy
    if high > low:
        value = high.to(tl.float32, bitcast=True)
        ties = many - few
        room = tl.minimum((mass_limit - light) / tl.maximum(value, 1e-38), ties.to(tl.float32)).to(tl.int32) + 1
        room = tl.minimum(room, top_k - few)
        if room < ties:
            cut = high
            last = nth_tie(at, spans, listed, width, most, temperature, high, room, SPAN, BLOCK)
            norm = light + room.to(tl.float32) * value
    return cut, last, norm


@triton.jit(do_not_specialize=["width", "chunks"], do_not_specialize_on_alignment=["total"])
def rules_kernel(
    logits, request, total, temperatures, top_ks, top_ps, min_ps, chunk_most, chunk_sums, chunk_best, tops, spans,
    most, norm, cut, last, best, width, row_stride, chunks, HAS_REQUEST: tl.constexpr, HAS_TOTAL: tl.constexpr,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_MIN: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr,
    SPAN: tl.constexpr, SPANS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r: merges row r's chunks and, if its request filters, finds the cut.

    Unfiltered rows read 12 bytes a chunk. Filtered ones also 4 a span, and the spans that may hold the cut, from L2,
    for every three bits of it until it is found.
    """
    row, i = tl.program_id(0), tl.arange(0, CHUNKS)
    if HAS_TOTAL:
        if row >= tl.load(total):
            return
    owner = row
    if HAS_REQUEST:
        owner = tl.load(request + row).to(tl.int32)
    temperature, greedy = heat(temperatures, owner)
    each = tl.load(chunk_most + row * chunks + i, mask=i < chunks, other=float("-inf"))
    largest = tl.max(each, 0)
    sums = tl.load(chunk_sums + row * chunks + i, mask=i < chunks, other=0.0)
    mass = tl.sum(sums * weight(each, largest, temperature), 0)
    token = tl.load(chunk_best + row * chunks + i, mask=i < chunks, other=0)
    tl.store(best + row, tl.min(tl.where(each == largest, token, width), 0))
    tl.store(most + row, largest)
    top_k, top_p, min_p = row * 0 + width, mass * 0.0 + 1.0, mass * 0.0
    if HAS_K:
        top_k = tl.minimum(tl.load(top_ks + owner), width).to(tl.int32)
    if HAS_P:
        top_p = tl.load(top_ps + owner)
    if HAS_MIN:
        min_p = tl.load(min_ps + owner)
    found_cut, found_last, found_norm = row * 0 - 1, row * 0 + width, mass
    if ((top_k < width) | (top_p < 1) | (min_p > 0)) & (greedy == 0):
        at, list_at = logits + row.to(tl.int64) * row_stride, spans + row.to(tl.int64) * SPANS
        span = tl.arange(0, SPANS)
        top = tl.load(
            tops + row.to(tl.int64) * (chunks * (CHUNK // SPAN)) + span, mask=span * SPAN < width, other=float("-inf")
        )
        top = tl.where(span * SPAN < width, weight(top, largest, temperature).to(tl.int32, bitcast=True), -1)
        found_cut, found_last, found_norm = search(
            at, list_at, top, width, largest, temperature, mass, top_k, top_p, min_p, PIVOTS, SPAN, SPANS, BLOCK
        )
    tl.store(cut + row, found_cut)
    tl.store(last + row, found_last)
    tl.store(norm + row, found_norm)


def statistics(
    logits: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor | None, top_ps: torch.Tensor | None,
    min_ps: torch.Tensor | None, request: torch.Tensor | None = None, total: torch.Tensor | None = None,
) -> Rows:  # fmt: skip
    """Statistics of the rows of logits [T, V], each row's request by `request` [T] int64 (None: row r is request r).

    total: [1], on the device; rows from this one on are padding and not written; None: no padding.
    """
    rows, width = logits.shape
    parts = chunks(width)
    floats = [torch.empty(size, dtype=torch.float32, device=logits.device) for size in ((rows, parts),) * 2]
    places = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    most, norm = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    cut, last, best = (torch.empty(rows, dtype=torch.int32, device=logits.device) for _ in range(3))
    filtered = any(rule is not None for rule in (top_ks, top_ps, min_ps))
    each = parts * (CHUNK // SPAN)
    listed = triton.next_power_of_2(each)
    tops = torch.empty((rows, each) if filtered else 1, dtype=torch.float32, device=logits.device)
    spans = torch.empty((rows, listed) if filtered else 1, dtype=torch.int32, device=logits.device)
    # A present argument takes the place of an absent one: the kernels do not read it.
    owner, end = temperatures if request is None else request, temperatures if total is None else total
    given = {"HAS_REQUEST": request is not None, "HAS_TOTAL": total is not None}
    chunk_kernel[(rows, parts)](
        logits, owner, end, temperatures, *floats, places, tops, width, logits.stride(0), parts, **given,
        HAS_TOPS=filtered, SPAN=SPAN, CHUNK=CHUNK, BLOCK=BLOCK,
    )  # fmt: skip
    rules_kernel[(rows,)](
        logits, owner, end, temperatures,
        *(temperatures if rule is None else rule for rule in (top_ks, top_ps, min_ps)), *floats, places, tops, spans,
        most, norm, cut, last, best, width, logits.stride(0), parts, **given, HAS_K=top_ks is not None,
        HAS_P=top_ps is not None, HAS_MIN=min_ps is not None, CHUNKS=max(2, triton.next_power_of_2(parts)),
        PIVOTS=PIVOTS, SPAN=SPAN, SPANS=listed, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return Rows(most, norm, cut, last, best)
