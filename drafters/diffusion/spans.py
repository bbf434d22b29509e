"""Where rows of a flattened batch stand: neighbouring positions, and the first that is to be encoded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.cpu import native
from outrider.kernels.flat_batch import FlatBatch


@dataclass(frozen=True, slots=True)
class Spans:
    """Neighbouring positions of requests, flattened to N rows.

    positions, slots: [N] int64. batch: which rows belong to which request.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    batch: FlatBatch

    @classmethod
    def of(cls, page_table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor) -> Spans:
        """Positions start .. start + count of each request, of which no count is 0: rows, starts, counts [R] int64."""
        if rows.is_cpu and native.available():
            positions, slots, indptr, kv_lens = torch.ops.outrider.spans(page_table, rows, starts, counts)
            return cls(positions, slots, FlatBatch(indptr, kv_lens, rows, page_table))
        ends = counts.cumsum(0)
        each = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        positions = torch.arange(len(each), device=counts.device) + (starts - ends + counts)[each]
        indptr = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
        batch = FlatBatch(indptr, (starts + counts).to(torch.int32), rows, page_table)
        return cls(positions, page_table[rows[each], positions].long(), batch)


def first_missing(
    encoded: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """[R] int64, the first of each text's positions whose slot is not `encoded` [S] bool, or its length [R]."""
    if rows.is_cpu and native.available():
        return torch.ops.outrider.first_missing(encoded, page_table, rows, lengths)
    positions = torch.arange(int(lengths.max()), device=lengths.device)
    slots = page_table[rows[:, None], positions].long()
    missing = (~encoded[slots]) & (positions < lengths[:, None])
    return torch.where(missing.any(1), missing.to(torch.uint8).argmax(1), lengths)
