"""Runs tests on each compiled variant, and allocates memory that ends at an unreadable page."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from outrider.kernels.cpu import native
from outrider.kernels.cpu.build import INSTRUCTION_SETS, TILES

SETS = {
    name: pytest.param(name, marks=() if name == native.instruction_set() else pytest.mark.slow)
    for name in (*INSTRUCTION_SETS, *TILES)
}
"""`make check` tests only this machine's default."""
EACH_SET = pytest.mark.parametrize("instruction_set", SETS.values(), indirect=True)
TILE_SETS = pytest.mark.parametrize("instruction_set", [SETS[name] for name in TILES], indirect=True)
"""Tiles: by the processor where it has them, and by the emulation everywhere."""


@contextmanager
def using(name: str) -> Iterator[None]:
    """Run kernels by this variant; skips the test if the processor does not support it."""
    chosen = native.instruction_set()
    if chosen == "none" or name not in torch.ops.outrider.instruction_sets():
        pytest.skip(f"this processor lacks {name}")
    torch.ops.outrider.use_instruction_set(name)
    yield
    torch.ops.outrider.use_instruction_set(chosen)


def before_a_guard(x: torch.Tensor) -> torch.Tensor:
    """A copy of x that ends at an unreadable page."""
    size, page = x.numel() * x.element_size(), mmap.PAGESIZE
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start + pages * page), ctypes.c_size_t(page), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=pages * page - size)
    return copy.copy_(x.flatten()).view(x.shape)
