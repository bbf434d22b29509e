"""Numbers of the host on their way to a device."""

from typing import Any

import numpy as np
import torch


def upload(numbers: np.ndarray, device: Any) -> torch.Tensor:
    """`numbers` on `device`, behind what is under way there, without waiting for it; on a CPU the same memory.

    From pageable memory a copy would wait. Pinned memory comes from torch's cache, which does not give it out again
    before the copy is done.
    """
    found = torch.from_numpy(numbers)
    if torch.device(device).type == "cpu":
        return found
    return found.pin_memory().to(device, non_blocking=True)
