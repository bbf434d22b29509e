"""A drafter's state of every KV slot, as SGLang sees a draft model's keys and values: sent with the target's."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SlotPool:
    """tensors: [slots, ...] each. page_size: slots of a page."""

    tensors: list[torch.Tensor]
    page_size: int

    @classmethod
    def of(cls, tensors: list[torch.Tensor], page_size: int) -> SlotPool | None:
        """A pool of these tensors; None where there are none.

        One of an odd number is there twice: SGLang takes the first half of all buffers for keys, the other for values.
        """
        return cls(tensors + tensors[: len(tensors) % 2], page_size) if tensors else None

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Addresses, bytes, and bytes of a page, of every buffer."""
        return (
            [each.data_ptr() for each in self.tensors],
            [each.nbytes for each in self.tensors],
            [each[0].nbytes * self.page_size for each in self.tensors],
        )
