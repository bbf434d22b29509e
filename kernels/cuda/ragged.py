"""Flatten drafts into a verify batch of a graph bucket's size, commit its accepted tokens, and list the cached slots
for FlashInfer. See `kernels/ragged.py`."""

import torch
import triton
import triton.language as tl

PADDING_BLOCK = 256
"""Padding tokens that one program of `flatten_kernel` writes."""
FEWEST = 64
"""Least requests that `flatten_kernel` is compiled for: fewer would be more variants to compile."""
COMMIT_BLOCK = 256
LANES, LIST_BLOCK = 16, 1024
"""Programs that share a request's list of cached slots, and slots that each writes at a time."""


@triton.jit(do_not_specialize=["requests", "tokens", "gamma", "request_stride", "token_stride", "page_stride"])
def flatten_kernel(
    anchors, drafts, verify_lens, seq_lens, page_table, rows, input_ids, positions, slots, qo_indptr, request, step,
    requests, tokens, gamma, request_stride, token_stride, page_stride, REQUESTS: tl.constexpr, WIDTH: tl.constexpr,
    PADDING: tl.constexpr,
):  # fmt: skip
    """Program r writes request r's tokens; programs after the last request write the padding.

    Each sums the lengths before it by itself (R * 8 bytes, which stay in L2), which saves a launch for a prefix
    sum. Reads 8 * R bytes a program and 8 + 4 a token, writes 40 bytes a token.
    """
    r = tl.program_id(0)
    every = tl.arange(0, REQUESTS)
    counts = tl.load(verify_lens + every, mask=every < requests, other=-1).to(tl.int32) + 1
    if r < requests:
        start = tl.sum(tl.where(every < r, counts, 0))
        k = tl.arange(0, WIDTH)
        length = tl.load(verify_lens + r).to(tl.int32)
        mask = (k <= length) & (start + k < tokens)
        drafted = tl.load(drafts + r * request_stride + (k - 1) * token_stride, mask=mask & (k > 0), other=0)
        position = tl.load(seq_lens + r) + k
        slot = tl.load(page_table + tl.load(rows + r) * page_stride + position, mask=mask, other=0)
        tl.store(input_ids + start + k, tl.where(k == 0, tl.load(anchors + r), drafted), mask=mask)
        tl.store(positions + start + k, position, mask=mask)
        tl.store(slots + start + k, slot.to(tl.int64), mask=mask)
        tl.store(request + start + k, tl.zeros([WIDTH], tl.int64) + r, mask=mask)
        tl.store(step + start + k, k.to(tl.int64), mask=mask)
        tl.store(qo_indptr + r + 1, (start + length + 1).to(tl.int64))
        if r == 0:
            tl.store(qo_indptr, (start * 0).to(tl.int64))
    else:
        t = tl.sum(counts) + (r - requests) * PADDING + tl.arange(0, PADDING)
        zero = tl.zeros([PADDING], tl.int64)
        tl.store(input_ids + t, zero, mask=t < tokens)
        tl.store(positions + t, zero, mask=t < tokens)
        tl.store(slots + t, zero, mask=t < tokens)
        tl.store(request + t, zero + (requests - 1), mask=t < tokens)
        tl.store(step + t, zero + (gamma + 1), mask=t < tokens)


def flatten(
    anchors: torch.Tensor, drafts: torch.Tensor, verify_lens: torch.Tensor, seq_lens: torch.Tensor,
    page_table: torch.Tensor, rows: torch.Tensor, tokens: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    requests, gamma = drafts.shape
    sizes = tokens, tokens, tokens, requests + 1, tokens, tokens
    found = tuple(anchors.new_empty(size, dtype=torch.int64) for size in sizes)
    flatten_kernel[(requests + triton.cdiv(tokens, PADDING_BLOCK),)](
        anchors, drafts, verify_lens, seq_lens, page_table, rows, *found, requests, tokens, gamma, drafts.stride(0),
        drafts.stride(1), page_table.stride(0), REQUESTS=max(FEWEST, triton.next_power_of_2(requests)),
        WIDTH=triton.next_power_of_2(gamma + 1), PADDING=PADDING_BLOCK, num_warps=1 if requests <= 256 else 4,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["requests", "count", "width"])
def commit_kernel(
    accept_lens, tokens, seq_lens, request, step, slots, new_seq_lens, bonus, kept_slots, requests, count, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Element i is request i and verified token i. Reads 40 bytes a request and 32 a token, writes 16 and 8."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    accepted = tl.load(accept_lens + i, mask=i < requests, other=1)
    tl.store(new_seq_lens + i, tl.load(seq_lens + i, mask=i < requests, other=0) + accepted, mask=i < requests)
    last = tl.load(tokens + i.to(tl.int64) * width + accepted - 1, mask=i < requests, other=0)
    tl.store(bonus + i, last, mask=i < requests)
    owner = tl.load(request + i, mask=i < count, other=0)
    kept = tl.load(step + i, mask=i < count, other=0) < tl.load(accept_lens + owner, mask=i < count, other=0)
    slot = tl.load(slots + i, mask=i < count, other=0)
    tl.store(kept_slots + i, tl.where(kept, slot, 0), mask=i < count)


def commit(
    accept_lens: torch.Tensor,
    tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    request: torch.Tensor,
    step: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    requests, width = tokens.shape
    found = torch.empty_like(seq_lens), torch.empty_like(seq_lens), torch.empty_like(slots)
    commit_kernel[(triton.cdiv(max(requests, len(slots)), COMMIT_BLOCK),)](
        accept_lens, tokens.contiguous(), seq_lens, request, step, slots, *found, requests, len(slots), width,
        BLOCK=COMMIT_BLOCK,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["count", "page_stride"])
def cached_slots_kernel(
    out, page_table, rows, begins, indptr, count, page_stride, LANES: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (request, lane): every LANES-th block of its list; the last program in the first axis: the padding.

    Reads and writes 4 bytes a slot, in the order of positions.
    """
    r, lane = tl.program_id(0), tl.program_id(1)
    requests = tl.num_programs(0) - 1
    real = r < requests
    start = tl.load(indptr + r)
    end = tl.load(indptr + tl.where(real, r + 1, r), mask=real, other=count)
    row = tl.load(rows + r, mask=real, other=0).to(tl.int64)
    position = tl.load(begins + r, mask=real, other=0)
    for first in range(start + lane * BLOCK, end, LANES * BLOCK):
        place = first + tl.arange(0, BLOCK)
        listed = page_table + row * page_stride + position + (place - start)
        slot = tl.load(listed, mask=(place < end) & real, other=0)
        tl.store(out + place, slot, mask=place < end)


def cached_slots(
    out: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor, begins: torch.Tensor, indptr: torch.Tensor
) -> None:
    cached_slots_kernel[(len(rows) + 1, LANES)](
        out, page_table, rows, begins, indptr, len(out), page_table.stride(0), LANES=LANES, BLOCK=LIST_BLOCK
    )
