"""Positions of a flattened batch's rows: consecutive ones, and the next ones to encode."""

from dataclasses import dataclass
from typing import Self

import torch

from outrider.kernels.cpu import native
from outrider.kernels.flat_batch import FlatBatch


@dataclass(frozen=True, slots=True)
class Spans:
    """Consecutive positions of requests, flattened to N rows. positions, slots: [N] int64. batch: which rows belong to
    which request."""

    positions: torch.Tensor
    slots: torch.Tensor
    batch: FlatBatch

    @classmethod
    def of(cls, page_table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor) -> Self:
        """Return positions start .. start + count of each request; rows, starts, counts: [R] int64, no count is 0."""
        if rows.is_cpu and native.available():
            positions, slots, indptr, kv_lens = torch.ops.outrider.spans(page_table, rows, starts, counts)
            return cls(positions, slots, FlatBatch(indptr, kv_lens, rows, page_table))
        size, most = int(counts.sum()), int(counts.max())
        return cls.padded(page_table, rows, starts, counts, size=size, most=most, longest=None)

    @classmethod
    def blocks(
        cls, page_table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, count: int, longest: int
    ) -> Self:
        """Return `count` positions of each request, on any device without waiting for it. longest: upper bound of
        starts."""
        positions = starts[:, None] + torch.arange(count, device=rows.device)
        indptr = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device) * count
        batch = FlatBatch(indptr, (starts + count).to(torch.int32), rows, page_table, count, longest + count)
        return cls(positions.flatten(), page_table[rows[:, None], positions].long().flatten(), batch)

    @classmethod
    def padded(
        cls, page_table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor, *,
        size: int, most: int, longest: int | None,
    ) -> Self:  # fmt: skip
        """Return `of` for counts that may be 0, as `size` rows, on any device without waiting for it.

        Rows left over are padding: position 0 at slot 0, which no request owns.
        most, longest: upper bounds of a count and of its end, as in `FlatBatch`.
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
    """Return [R] int64, tokens to encode of each backlog [R]: at most `most` of each and `room` in all, short backlogs
    first."""
    order = backlog.argsort(stable=True)
    wanted = backlog[order].clamp(max=most)
    left = (room - (wanted.cumsum(0) - wanted)).clamp(min=0)
    return torch.empty_like(wanted).scatter_(0, order, torch.minimum(wanted, left))


def first_missing(
    encoded: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, longest: int | None
) -> torch.Tensor:
    """Return [R] int64, the first position of each text with a slot that is not `encoded` [S] bool, or its length [R].
    longest: upper bound of the lengths; with it no device is waited for. None: read them."""
    if longest is None and rows.is_cpu and native.available():
        return torch.ops.outrider.first_missing(encoded, page_table, rows, lengths)
    longest = int(lengths.max()) if longest is None else min(longest, page_table.shape[1])
    positions = torch.arange(longest, device=lengths.device)
    slots = page_table[rows[:, None], positions].long()
    missing = (~encoded[slots]) & (positions < lengths[:, None])
    return torch.where(missing.any(1), missing.to(torch.uint8).argmax(1), lengths)
