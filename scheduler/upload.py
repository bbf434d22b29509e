"""Copying numbers from the host to a device."""

from typing import Any

import numpy as np
import torch


def upload(numbers: np.ndarray, device: Any) -> torch.Tensor:
    """`numbers` on `device`, copied in stream order without waiting for the device; on a CPU the same memory.

    A copy from pageable memory would wait. Pinned memory comes from torch's cache, which does not give it out again
    before the copy is done.
    """
    tensor = torch.from_numpy(numbers)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
