"""Positions of a flattened batch's rows: neighbouring ones, and those that are to be encoded."""

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
        size, most = int(counts.sum()), int(counts.max())
        return cls.padded(page_table, rows, starts, counts, size=size, most=most, longest=None)

    @classmethod
    def blocks(
        cls, page_table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, count: int, longest: int
    ) -> Spans:
        """`count` positions of each request, on any device and without waiting for it; longest: bound of starts."""
        positions = starts[:, None] + torch.arange(count, device=rows.device)
        indptr = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device) * count
        batch = FlatBatch(indptr, (starts + count).to(torch.int32), rows, page_table, count, longest + count)
        return cls(positions.flatten(), page_table[rows[:, None], positions].long().flatten(), batch)

    @classmethod
    def padded(
        cls, page_table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor, *,
        size: int, most: int, longest: int | None,
    ) -> Spans:  # fmt: skip
        """`of` for counts that may be 0, as `size` rows, on any device and without waiting for it.

        What is left over is padding: position 0 at slot 0, which no request owns. most, longest: bounds of a count
        and of its end, as `FlatBatch` has them.
        """
        indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        place = torch.arange(size, device=rows.device)
        request = torch.searchsorted(indptr[1:].contiguous(), place, right=True)
        padding = request == len(rows)
        request = request.clamp(max=len(rows) - 1)
        positions = (starts[request] + place - indptr[request]).masked_fill(padding, 0)
        slots = page_table[rows[request], positions].long().masked_fill(padding, 0)
        kv_lens = (starts + counts).to(torch.int32)
        batch = FlatBatch(indptr.to(torch.int32), kv_lens, rows, page_table, most, longest)
        return cls(positions, slots, batch)


def shares(backlog: torch.Tensor, room: int, most: int) -> torch.Tensor:
    """[R] int64, tokens of each backlog [R] that are encoded, `most` at most, all together `room`: short ones first."""
    order = backlog.argsort(stable=True)
    wanted = backlog[order].clamp(max=most)
    left = (room - (wanted.cumsum(0) - wanted)).clamp(min=0)
    return torch.empty_like(wanted).scatter_(0, order, torch.minimum(wanted, left))


def first_missing(
    encoded: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, longest: int | None
) -> torch.Tensor:
    """[R] int64, the first of each text's positions whose slot is not `encoded` [S] bool, or its length [R].

    longest: bound of the lengths, with which no device is waited for; None: they are read.
    """
    if longest is None and rows.is_cpu and native.available():
        return torch.ops.outrider.first_missing(encoded, page_table, rows, lengths)
    longest = int(lengths.max()) if longest is None else min(longest, page_table.shape[1])
    positions = torch.arange(longest, device=lengths.device)
    slots = page_table[rows[:, None], positions].long()
    missing = (~encoded[slots]) & (positions < lengths[:, None])
    return torch.where(missing.any(1), missing.to(torch.uint8).argmax(1), lengths)
