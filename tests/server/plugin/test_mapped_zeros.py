"""The KV cache of a CPU takes memory as it fills."""

import psutil
import torch

from outrider.server.plugin.cpu.mapped import mapped_zeros


def test_zeros_take_memory_once_they_are_written() -> None:
    process, half = psutil.Process(), 64 << 20
    before = process.memory_info().rss
    zeros = mapped_zeros((2, half // 2), torch.bfloat16)
    assert process.memory_info().rss - before < half // 4
    zeros[0] = 1
    assert half // 2 < process.memory_info().rss - before < half + half // 2
    assert zeros[1, -1] == 0
    assert zeros[0, -1] == 1
