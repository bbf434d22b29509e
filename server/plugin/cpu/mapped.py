"""Memory that the system provides page by page, as it is written."""

import math
import mmap
from collections.abc import Sequence

import torch


def mapped_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that take memory only once written: torch.zeros would write all pages."""
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(tuple(shape), dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))
