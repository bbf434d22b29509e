"""Laying the requests of a decode step out as one batch without padding, and their new slots into the page table.

A few numbers per request. The compiled kernels do each in one call; a dozen of torch's small operations take as long as
a layer of a small model, and `repeat_interleave` wakes every thread.
"""

from __future__ import annotations

import torch

from outrider.kernels.cpu import native

Flattened = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def flatten_verify(
    anchors: torch.Tensor,
    drafts: torch.Tensor,
    verify_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
) -> Flattened:
    """Anchors [R] and the first verify_lens [R] of drafts [R, gamma] as one batch of B = sum(1 + verify_lens) tokens.

    seq_lens: [R], the anchors' positions. page_table: [rows, context] int32, the slot of every position. rows: [R].
    All others are int64, and so is what is returned: input_ids, positions and slots [B], qo_indptr [R+1] (where each
    request begins, and where the last one ends), request [B] and step [B] (k: 0 is the anchor, 1.. the drafts).
    """
    if anchors.is_cpu and native.available():
        return torch.ops.outrider.flatten_verify(anchors, drafts, verify_lens, seq_lens, page_table, rows)
    return torch_flatten_verify(anchors, drafts, verify_lens, seq_lens, page_table, rows)


def torch_flatten_verify(
    anchors: torch.Tensor,
    drafts: torch.Tensor,
    verify_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
) -> Flattened:
    """`flatten_verify` without compiled kernels, on any device."""
    query_lens = verify_lens + 1
    ends = query_lens.cumsum(0)
    request = torch.arange(rows.numel(), device=rows.device).repeat_interleave(query_lens)
    step = torch.arange(request.numel(), device=rows.device) - (ends - query_lens)[request]
    block = torch.cat([anchors[:, None], drafts], 1)
    positions = seq_lens[request] + step
    slots = page_table[rows[request], positions].long()
    return block[request, step], positions, slots, torch.cat([ends.new_zeros(1), ends]), request, step


def write_page_table(
    page_table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write slots [N] into positions starts..ends [R] of rows [R] of page_table [rows, context] int32, in order."""
    rows, starts, ends = rows.long(), starts.long(), ends.long()
    if page_table.is_cpu and native.available():
        torch.ops.outrider.write_page_table(page_table, rows, starts, ends, slots.long())
    else:
        torch_write_page_table(page_table, rows, starts, ends, slots)


def torch_write_page_table(
    page_table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, slots: torch.Tensor
) -> None:
    """`write_page_table` without compiled kernels, on any device."""
    lengths = ends - starts
    before = lengths.cumsum(0) - lengths
    row = rows.repeat_interleave(lengths)
    offsets = torch.arange(row.numel(), device=row.device) - before.repeat_interleave(lengths)
    page_table[row, starts.repeat_interleave(lengths) + offsets] = slots[: row.numel()].to(page_table.dtype)
