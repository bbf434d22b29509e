"""A drafter's state of every KV slot, sent with the target's keys and values as if it were a draft model's."""

from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True)
class SlotPool:
    """tensors: [slots, ...] each. page_size: slots of a page."""

    tensors: list[torch.Tensor]
    page_size: int

    @classmethod
    def of(cls, tensors: list[torch.Tensor], page_size: int) -> Self | None:
        """Return a pool of these tensors; None without tensors.

        If their number is odd, the first is added twice: SGLang takes the first half of all buffers for keys, the
        second for values.
        """
        return cls(tensors + tensors[: len(tensors) % 2], page_size) if tensors else None

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Return addresses, bytes, and bytes of a page, of every buffer."""
        return (
            [each.data_ptr() for each in self.tensors],
            [each.nbytes for each in self.tensors],
            [each[0].nbytes * self.page_size for each in self.tensors],
        )
