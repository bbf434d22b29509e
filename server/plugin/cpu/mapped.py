"""Memory that this process gets from the system page by page, as it is written."""

import math
import mmap
from collections.abc import Sequence

import torch


def mapped_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages take memory once they are written: torch.zeros would write them all."""
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(tuple(shape), dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))
