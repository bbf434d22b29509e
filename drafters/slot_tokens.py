"""The token of every KV slot: a request's text can be read back through its page table."""

import torch


class SlotTokens:
    """Remembers the token of every KV slot. Indexed like keys and values, so a prefix shared by the radix cache brings
    its tokens along."""

    def __init__(self, slots: int, device: torch.device | str = "cpu"):
        self.tokens = torch.zeros(slots, dtype=torch.int32, device=device)

    def write(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Store tokens [N] at slots [N]."""
        self.tokens.index_put_((slots,), tokens.to(torch.int32))

    def read(self, page_table: torch.Tensor, rows: torch.Tensor, length: int) -> torch.Tensor:
        """Read the first `length` tokens of rows [R]: [R, length] int64; beyond a request's end, arbitrary."""
        slots = page_table[rows, :length].long()
        return self.tokens[slots].long()
