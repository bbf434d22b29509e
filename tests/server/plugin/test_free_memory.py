import subprocess
import sys

import pytest

PROGRAM = """
import time, psutil, torch
from outrider.server.plugin.cpu.free_memory import give_back_free_memory

def resident():
    return psutil.Process().memory_info().rss / 1e6

torch.ones(30_000_000, dtype=torch.uint8)  # freed: from now on blocks up to this size come from the heap
tensors = [torch.ones(size, dtype=torch.uint8) for _ in range(20) for size in (12_000_000, 100_000)]
stay = tensors[1::2]
full = resident()
del tensors
kept = resident()
give_back_free_memory(every=0.05)
until = time.monotonic() + 10
while resident() > full - 200 and time.monotonic() < until:
    time.sleep(0.05)
print(full, kept, resident())
"""


@pytest.mark.slow
def test_free_memory_between_allocated_blocks_is_returned() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    full, kept, given_back = map(float, done.stdout.split())
    assert kept > full - 100  # the allocator keeps it
    assert given_back < full - 200
