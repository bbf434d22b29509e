"""A drafter's state in SGLang's transfer, and mismatched servers."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from outrider.server.plugin.hooks import disaggregation
from outrider.server.plugin.slot_pool import SlotPool


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_lie_where_sglang_expects_them(count: int, page_size: int) -> None:
    """Buffer i, page j: `address + j * bytes of a page`; the number of buffers is even."""
    tensors = [torch.arange(8 * width, dtype=torch.int32).view(8, width) for width in range(1, count + 1)]
    pool = SlotPool.of(tensors, page_size)
    assert pool is not None
    addresses, sizes, page_bytes = pool.get_contiguous_buf_infos()
    assert len(addresses) == len(sizes) == len(page_bytes) == count + count % 2
    for tensor, address, size, each in zip(tensors, addresses, sizes, page_bytes, strict=False):
        assert size == 8 * tensor.shape[1] * 4
        page = (ctypes.c_int32 * (each // 4)).from_address(address + each)
        assert list(page) == tensor[page_size : 2 * page_size].flatten().tolist()


def test_servers_with_different_slot_sizes_are_no_pair() -> None:
    """SGLang would write past them, or pair keys with values."""
    manager = SimpleNamespace(kv_args=SimpleNamespace(kv_item_lens=[64, 64, 4, 8]))

    def compare(*sizes: int) -> tuple[bool, str | None]:
        peer = SimpleNamespace(dst_kv_item_lens=list(sizes))
        return disaggregation._compare(lambda manager, peer: (True, None), manager, peer)

    assert compare(64, 64, 4, 8) == (True, None)
    for changed in ((64, 64), (64, 64, 4, 16), (64, 64, 4, 8, 4, 8), ()):
        assert compare(*changed) == (False, disaggregation.UNLIKE)


def test_polling_releases_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(disaggregation.time, "sleep", slept.append)
    for idle in (True, False):
        disaggregation._pause(lambda scheduler: None, SimpleNamespace(is_fully_idle=lambda idle=idle: idle))
    assert slept == [disaggregation.PAUSE_SECONDS]
