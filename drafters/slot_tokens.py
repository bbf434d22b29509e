"""The tokens behind the KV slots: a request's text can be read back through its page table."""

from __future__ import annotations

import torch


class SlotTokens:
    """Remembers the token of every KV slot.

    Indexed like the keys and values, so a prefix that the radix cache hands on brings its tokens along.
    """

    def __init__(self, slots: int, device: torch.device | str = "cpu"):
        self.tokens = torch.zeros(slots, dtype=torch.int32, device=device)

    def write(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Store tokens [N] at slots [N]."""
        self.tokens.index_put_((slots,), tokens.to(torch.int32))

    def read(self, page_table: torch.Tensor, rows: torch.Tensor, length: int) -> torch.Tensor:
        """The first `length` tokens behind each of rows [R]: [R, length] int64; beyond a request's end, arbitrary."""
        slots = page_table[rows, :length].long()
        return self.tokens[slots].long()
