"""Lay out the requests of a decode step as one batch without padding, and write their new slots to the page table.
These are a few numbers per request, so the number of calls decides the time: the compiled kernels do each in one."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .cpu import native
from .cuda import native as cuda

Pair = tuple[torch.Tensor, torch.Tensor]


def copy_all(pairs: Sequence[Pair]) -> None:
    """Copy the second of each pair into the first; one launch where all have one type and the two of a pair strides
    alike."""
    filled = [pair for pair in pairs if len(pair[0])]
    torch._foreach_copy_([target for target, _ in filled], [source for _, source in filled])


class FlatVerify(NamedTuple):
    """One verify batch, flattened: B = sum(1 + verify_lens) tokens, or a larger bucket that ends in padding.

    input_ids, positions, slots: [B] int64. qo_indptr: [R+1] int64, where each request begins, and where
    the last one ends. request: [B] int64, each token's. step: [B] int64, k: 0 is the anchor, 1..verify_len the drafted
    tokens. For padding see `flatten_verify`.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    qo_indptr: torch.Tensor
    request: torch.Tensor
    step: torch.Tensor


def flatten_verify(
    anchors: torch.Tensor,
    drafts: torch.Tensor,
    verify_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    tokens: int | None = None,
) -> FlatVerify:
    """Return anchors [R] and the first verify_lens [R] of drafts [R, gamma] as one batch of B tokens.

    seq_lens: [R], the anchors' positions. page_table: [rows, context] int32, the slot of every position. rows: [R].
        All but page_table are int64.
    tokens: B, at least sum(1 + verify_lens): a graph's bucket, with a shape that does not depend on the lengths. Rows
        left over are padding: token 0 at position 0 and slot 0, which no request owns. A padding token has the last
        request, so that it may index arrays [R], and step gamma + 1, which no request accepts. None: that sum.
    """
    batch = anchors, drafts, verify_lens, seq_lens, page_table, rows
    if tokens is None and anchors.is_cpu and native.available():
        return FlatVerify(*torch.ops.outrider.flatten_verify(*batch))
    tokens = int((verify_lens + 1).sum()) if tokens is None else tokens
    if cuda.fits(anchors):
        return FlatVerify(*cuda.ragged.flatten(*batch, tokens))
    requests, gamma = drafts.shape
    indptr = torch.nn.functional.pad((verify_lens + 1).cumsum(0), (1, 0))
    place = torch.arange(tokens, device=rows.device)
    request = torch.searchsorted(indptr[1:].contiguous(), place, right=True)
    padding = request == requests
    request = request.clamp(max=requests - 1)
    step = (place - indptr[request]).masked_fill(padding, gamma + 1)
    block = torch.cat([anchors[:, None], drafts], 1)
    ids = block[request, step.clamp(max=gamma)].masked_fill(padding, 0)
    positions = (seq_lens[request] + step).masked_fill(padding, 0)
    slots = page_table[rows[request], positions].long().masked_fill(padding, 0)
    return FlatVerify(ids, positions, slots, indptr, request, step)


Committed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def commit(
    accept_lens: torch.Tensor,
    tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    request: torch.Tensor,
    step: torch.Tensor,
    slots: torch.Tensor,
) -> Committed:
    """Return the results of a step: cached tokens [R], next anchors [R], and the slots [T] of verified tokens that
    stay.

    accept_lens: [R] int64 in 1..gamma+1, tokens: [R, gamma+1] int64, as from `acceptance.accept`. seq_lens: [R] int64.
    request, step, slots: [T] int64, as from `flatten_verify`. Rejected tokens and padding get slot 0, so that a caller
        that keeps state by slot can write all T rows.
    """
    if cuda.fits(accept_lens):
        return cuda.ragged.commit(accept_lens, tokens, seq_lens, request, step, slots)
    bonus = tokens.gather(1, accept_lens[:, None] - 1).squeeze(1)
    return seq_lens + accept_lens, bonus, slots.where(step < accept_lens[request], 0)


def write_page_table(
    page_table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write slots [N] into positions starts..ends [R] of rows [R] of page_table [rows, context] int32, in order."""
    rows, starts, ends = rows.long(), starts.long(), ends.long()
    if page_table.is_cpu and native.available():
        torch.ops.outrider.write_page_table(page_table, rows, starts, ends, slots.long())
        return
    lengths = ends - starts
    before = lengths.cumsum(0) - lengths
    row = rows.repeat_interleave(lengths)
    offsets = torch.arange(row.numel(), device=row.device) - before.repeat_interleave(lengths)
    page_table[row, starts.repeat_interleave(lengths) + offsets] = slots[: row.numel()].to(page_table.dtype)


def write_cached_slots(
    out: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor, begins: torch.Tensor, indptr: torch.Tensor
) -> None:
    """Write the KV slots of rows [R] of page_table [rows, context], each from position begins [R] on, into out [N].

    indptr: [S + 1], out[indptr[r]:indptr[r + 1]] is request r's; the rest of out is padding and gets slot 0, which no
        request owns. The host knows N, so no call waits for the device.
    """
    if cuda.fits(out, page_table):
        cuda.ragged.cached_slots(out, page_table, rows, begins, indptr)
        return
    place, last = torch.arange(len(out), device=out.device), len(rows) - 1
    request = torch.searchsorted(indptr[1:].contiguous(), place, right=True)
    padding = request > last
    request = request.clamp(max=last)
    position = (begins[request] + place - indptr[request]).masked_fill(padding, 0)
    out.copy_(page_table[rows[request], position].masked_fill(padding, 0))
