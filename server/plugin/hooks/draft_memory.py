"""Make SGLang's KV cache leave room for the drafter's weights and state on the same GPU.

SGLang counts only draft models of its own algorithms. Ours is created after the cache, and would take the memory that
SGLang keeps for activations. Logits and distributions of a step's graphs are not counted, see docs/gpu.md.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from outrider.drafters import registry
from outrider.drafters.registry import Memory

from ..config import PluginConfig

SIZES = "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator"


def register() -> None:
    HookRegistry.register(SIZES, _with_drafter, HookType.AROUND)


def _with_drafter(original: Callable[[Any], Any], kvc: Any) -> Any:
    configurator, config = original(kvc), PluginConfig.from_env()
    if config.drafter != "off":
        memory = registry.memory(
            config.drafter, config.drafter_path, lookup_gamma=config.lookup_gamma, dtype=kvc.model_config.dtype
        )
        configurator.calculate_pool_sizes = partial(leave_room, configurator.calculate_pool_sizes, memory)
    return configurator


def leave_room(calculate: Callable[[int, int], Any], memory: Memory, available: int, page_size: int) -> Any:
    """Return SGLang's sizes for `available` bytes, leaving room for the drafter's memory."""
    available -= memory.fixed
    room = available
    while True:
        sizes = calculate(room, page_size)
        tokens = sizes.max_total_num_tokens
        beyond = room + memory.per_slot * (tokens + page_size) - available
        if beyond <= 0:
            return sizes
        room -= math.ceil(beyond / (1 + memory.per_slot * tokens / room))
