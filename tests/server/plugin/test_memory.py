"""Memory: the drafter's in SGLang's sizing of the KV cache, of caches that fill, and free memory."""

import subprocess
import sys

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
from tiny_drafters import CONFIGS, make_model

from outrider.drafters import registry
from outrider.drafters.block.checkpoint import load, save_compact, save_plain
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.registry import Memory
from outrider.server.plugin.cpu.mapped import mapped_zeros
from outrider.server.plugin.hooks.draft_memory import leave_room


def sglangs(cell_size):
    """SGLang's configurator of ordinary models."""
    configurator = DefaultPoolConfigurator.__new__(DefaultPoolConfigurator)
    configurator._cell_size, configurator._fixed_overhead_bytes = cell_size, 0
    return configurator


@given(
    st.integers(1, 4000), st.integers(0, 4000), st.integers(0, 10**8), st.integers(10**8, 10**11),
    st.sampled_from([1, 16, 64]),
)  # fmt: skip
def test_cache_and_drafter_fit_together_and_leave_little(cell_size, per_slot, fixed, available, page_size):
    memory = Memory(fixed, per_slot)
    if available - fixed < 10 * page_size * (cell_size + per_slot):
        return
    tokens = leave_room(sglangs(cell_size).calculate_pool_sizes, memory, available, page_size).max_total_num_tokens
    assert tokens * cell_size + (tokens + page_size) * per_slot + fixed <= available
    assert (tokens + 4 * page_size) * (cell_size + per_slot) + fixed > available * 0.99


def test_a_drafter_that_alone_is_too_large_is_refused_as_sglang_does():
    with pytest.raises(RuntimeError, match="Not enough memory"):
        leave_room(sglangs(100).calculate_pool_sizes, Memory(2000, 4), 1000, 1)


@pytest.mark.parametrize("save", [save_plain, save_compact])
@pytest.mark.parametrize("name", ["dspark", "truncated", "dflash"])
def test_the_reported_memory_is_the_drafters(tmp_path, name, save):
    config = CONFIGS[name]
    save(make_model(config), tmp_path)
    told = registry.memory(config.kind, str(tmp_path), lookup_gamma=4, dtype=torch.float32)
    rows = torch.zeros(config.vocab_size, config.hidden_size)
    drafter = BlockDrafter(load(tmp_path, dtype=torch.float32), embedding=rows, head=rows)
    drafter.allocate(100)
    pools = sum(pool.nbytes for pair in drafter.pools for pool in pair)
    assert told.per_slot == pools / 100 + 2 * 4
    tensors = [*drafter.model.parameters(), *drafter.model.buffers()]
    expected = sum(tensor.nbytes for tensor in tensors if tensor is not drafter.model.vocab)
    if drafter.vocab is not None:
        expected += drafter.head.nbytes
    assert expected <= told.fixed <= expected * 1.2 + 4 * config.vocab_size * (config.markov_rank + 1)


def test_prompt_lookup_has_tokens_alone():
    assert registry.memory("ngram", "", lookup_gamma=0, dtype=torch.bfloat16) == Memory(0, 8)


def test_zeros_take_memory_once_they_are_written() -> None:
    process, half = psutil.Process(), 64 << 20
    before = process.memory_info().rss
    zeros = mapped_zeros((2, half // 2), torch.bfloat16)
    assert process.memory_info().rss - before < half // 4
    zeros[0] = 1
    assert half // 2 < process.memory_info().rss - before < half + half // 2
    assert zeros[1, -1] == 0
    assert zeros[0, -1] == 1


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
