"""Rows of a weight in blocks, read one by one: an embedding that is not kept a second time as bfloat16."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .blocks import KINDS, expand, rows_of_blocks
from .cpu import native


@dataclass(frozen=True, slots=True)
class BlockRows:
    """A matrix [outputs, depth] in a GGUF tensor's blocks, indexed like the bfloat16 tensor that it stands for.

    raw: [outputs, bytes of a row] uint8, as in the file; it may be mapped from there. kind: a name of `blocks.KINDS`.

    Raises
    ------
    ValueError
        The bytes do not fit the kind or the depth, or a scale is not finite.
    """

    raw: torch.Tensor
    kind: str
    depth: int

    def __post_init__(self) -> None:
        rows_of_blocks(self.raw, self.kind, len(self.raw), self.depth)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.raw.shape[0], self.depth))

    @property
    def device(self) -> torch.device:
        return self.raw.device

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [N] integers. Returns [N, depth] bfloat16."""
        if self.raw.is_cpu and native.available():
            return torch.ops.outrider.expand_rows(self.raw, rows.long().contiguous(), list(KINDS).index(self.kind))
        return expand(self.raw[rows], self.kind, len(rows), self.depth)

    def first(self, rows: int) -> BlockRows:
        """The first so many rows, still in blocks."""
        return replace(self, raw=self.raw[:rows])
