"""Copying numbers from the host to a device."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

ALIGNED = 16
"""Bytes; a kernel's loads are widest, and its variants fewest, where arrays begin at such places."""


class LastUpload:
    """Numbers of the host on a device, sent again only if they have changed."""

    def __init__(self) -> None:
        self._sent: tuple[np.ndarray, torch.Tensor] | None = None

    def of(self, numbers: np.ndarray, device: Any) -> torch.Tensor:
        """Return `numbers` on the device, the same one in every call; the caller must not change `numbers` later."""
        if self._sent is None or not (self._sent[0] is numbers or np.array_equal(self._sent[0], numbers)):
            self._sent = numbers, upload(numbers, device)
        return self._sent[1]


def upload(numbers: np.ndarray, device: Any) -> torch.Tensor:
    """Return `numbers` on `device`, copied in stream order without waiting for it; on a CPU the same memory.

    A copy from pageable memory would wait. Pinned memory comes from torch's cache, which does not give it out again
    before the copy is done.
    """
    tensor = torch.from_numpy(numbers)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_together(arrays: Sequence[np.ndarray], device: Any) -> list[torch.Tensor]:
    """Do `upload` for several arrays by one copy; each begins at a multiple of ALIGNED bytes."""
    if torch.device(device).type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    begins = [0, *accumulate(-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays)]
    packed = np.empty(begins[-1], dtype=np.uint8)
    for begin, array in zip(begins[:-1], arrays, strict=True):
        packed[begin : begin + array.nbytes] = np.frombuffer(array.tobytes(), dtype=np.uint8)
    sent = upload(packed, device)
    return [
        sent[begin : begin + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for begin, array in zip(begins[:-1], arrays, strict=True)
    ]
