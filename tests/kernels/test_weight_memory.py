"""Packed weights lie in huge pages, which are returned."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from outrider.kernels.blocks import pack_blocks
from outrider.kernels.cpu import native
from outrider.kernels.linear import pack

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiled kernels here")

MB = 1 << 20
huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without huge pages"
)


def blocks(weight: torch.Tensor) -> torch.Tensor:
    outputs, depth = weight.shape
    raw = torch.zeros(outputs, depth // 32 * 34, dtype=torch.uint8)
    return pack_blocks(raw, "Q8_0", outputs, depth).panels


def panels(weight: torch.Tensor) -> torch.Tensor:
    return pack(weight).panels


def advised() -> Iterator[range]:
    place = range(0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "VmFlags:" and "hg" in rest:
            yield place
        elif "-" in first:
            start, end = first.split("-")
            place = range(int(start, 16), int(end, 16))


@huge_pages
@pytest.mark.parametrize("packed", [blocks, panels], ids=lambda f: f.__name__)
@pytest.mark.parametrize("outputs", [64, 70_000], ids=["a small weight", "a large one"])
def test_huge_pages_are_requested(packed, outputs: int) -> None:
    weight = packed(torch.zeros(outputs, 256))
    first, last = weight.data_ptr(), weight.data_ptr() + weight.nbytes - 1
    assert any(first in place and last in place for place in advised())
    assert first % 64 == 0


def test_weights_do_not_overlap() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(outputs, 64) for outputs in (1, 64, 65, 200) for _ in range(3)]
    packed = [pack(weight) for weight in weights]
    places = sorted((part.panels.data_ptr(), part.panels.nbytes) for part in packed)
    assert all(first + size <= second for (first, size), (second, _) in pairwise(places))


@huge_pages
@pytest.mark.parametrize("outputs", [4096, 100_000], ids=["of small weights", "of a large one"])
def test_memory_is_given_back(outputs: int) -> None:
    weight = torch.ones(outputs, 256)
    own = weight.nbytes
    count = 200 * MB // own
    packed = [pack(weight).panels for _ in range(count)]
    places = [part.data_ptr() for part in packed if part is not None]

    def held() -> int:
        mapped = list(advised())
        return own * sum(any(first in place for place in mapped) for first in places)

    assert held() == count * own
    del packed
    assert held() < 64 * MB
