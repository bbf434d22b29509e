"""Prompt lookup: the latest of the longest matches of a text's last tokens; see `drafters/ngram.py`.

One launch, a program for each text. It reads the tokens of a text twice, through the page table. It reads the tokens
before a position only if the position's token equals the last one.
"""

import torch
import triton
import triton.language as tl

POSITIONS = 1024
"""Positions of a text compared at once."""


@triton.jit
def token_at(history, table, position, there, last, anchor):
    """Return the tokens at positions of a text that ends with the anchor at `last`; -2 for no token."""
    slot = tl.load(table + position, mask=there, other=0).to(tl.int64)
    token = tl.load(history + slot, mask=there, other=-2).to(tl.int64)
    return tl.where(there & (position == last), anchor, token)


@triton.jit
def matched_before(history, table, position, last, anchor, most):
    """Number of tokens before each position that equal the last ones of the text, up to `most`."""
    matched = position * 0
    going = (position > 0) & (position <= last)
    k, left = last * 0, tl.sum(going.to(tl.int32), 0)
    while (k < most) & (left > 0):
        wanted = token_at(history, table, last - k, k <= last, last, anchor)
        before = position - 1 - k
        going = going & (before >= 0) & (k <= last)
        going = going & (token_at(history, table, before, going, last, anchor) == wanted)
        matched += going.to(tl.int32)
        left = tl.sum(going.to(tl.int32), 0)
        k += 1
    return matched


@triton.jit(do_not_specialize=["gamma", "most", "least", "table_stride"])
def lookup_kernel(
    history, page_table, rows, seq_lens, anchors, temperatures, by_length, by_odds, by_temperature, tokens, lens,
    confidence, gamma, most, least, table_stride, WIDTH: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Program r: the draft of request r, its length and its confidences."""
    r, i, step = tl.program_id(0).to(tl.int64), tl.arange(0, POSITIONS), tl.arange(0, WIDTH)
    last, anchor = tl.load(seq_lens + r).to(tl.int32), tl.load(anchors + r)
    table = page_table + tl.load(rows + r) * table_stride
    best, found, long = (
        tl.full([POSITIONS], 0, tl.int64),
        tl.zeros([POSITIONS], tl.int32),
        tl.zeros([POSITIONS], tl.int32),
    )
    for start in range(0, last + 1, POSITIONS):
        position = start + i
        matched = matched_before(history, table, position, last, anchor, most)
        best = tl.maximum(best, (matched.to(tl.int64) << 32) + position)
        found += (matched >= 1).to(tl.int32)
        long += (matched >= least).to(tl.int32)
    latest = tl.max(best, 0)
    longest = (latest >> 32).to(tl.int32)
    begin = tl.where(longest > 0, latest & 0xFFFFFFFF, last.to(tl.int64)).to(tl.int32)
    first = token_at(history, table, begin, begin <= last, last, anchor)
    agree, agree_long = tl.zeros([POSITIONS], tl.int32), tl.zeros([POSITIONS], tl.int32)
    for start in range(0, last + 1, POSITIONS):
        position = start + i
        same = token_at(history, table, position, position <= last, last, anchor) == first
        matched = matched_before(history, table, position, last, anchor, least)
        agree += (same & (matched >= 1)).to(tl.int32)
        agree_long += (same & (matched >= least)).to(tl.int32)
    at = begin + step % (last + 1 - begin)
    inside = step < gamma
    tl.store(tokens + r * gamma + step, token_at(history, table, at, inside, last, anchor), mask=inside)
    tl.store(lens + r, tl.where(longest >= least, gamma, 0).to(tl.int64))
    logit = tl.load(by_length + longest * gamma + step, mask=inside, other=0.0)
    logit += odds(tl.sum(agree_long, 0), tl.sum(long, 0)) * tl.load(by_odds + step, mask=inside, other=0.0)
    logit += odds(tl.sum(agree, 0), tl.sum(found, 0)) * tl.load(by_odds + gamma + step, mask=inside, other=0.0)
    logit += tl.load(temperatures + r) * tl.load(by_temperature + step, mask=inside, other=0.0)
    tl.store(confidence + r * gamma + step, 1.0 / (1.0 + tl.exp(-logit)), mask=inside)


@triton.jit
def odds(agreeing, counted):
    """Log odds of `agreeing` out of `counted`."""
    return tl.log((agreeing.to(tl.float32) + 0.5) / ((counted - agreeing).to(tl.float32) + 0.5))


def lookup(
    history: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor,
    anchors: torch.Tensor, temperatures: torch.Tensor, by_length: torch.Tensor, by_odds: torch.Tensor,
    by_temperature: torch.Tensor, min_match: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return tokens [R, gamma] int64, lengths [R] int64, confidences [R, gamma] float32, as in `NgramDrafter`."""
    requests, gamma = len(rows), by_length.shape[1]
    tokens, lens = anchors.new_empty(requests, gamma), torch.empty_like(anchors)
    confidence = by_length.new_empty(requests, gamma)
    if requests:
        lookup_kernel[(requests,)](
            history, page_table, rows, seq_lens, anchors, temperatures, by_length, by_odds, by_temperature, tokens,
            lens, confidence, gamma, len(by_length) - 1, min_match, page_table.stride(0),
            WIDTH=max(2, triton.next_power_of_2(gamma)), POSITIONS=POSITIONS, num_warps=8,
        )  # fmt: skip
    return tokens, lens, confidence
