"""Gives lengths to SGLang's dummy verification, with which FlashInfer tunes its kernels at start.

SGLang creates `spec_info` for its own algorithms only; without it our attention backends have no lengths.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ..spec_inputs import ragged_layout, verify_input

DUMMIES = "sglang.srt.model_executor.model_runner.ModelRunner.prepare_dummy_forward_batch"


def register() -> None:
    HookRegistry.register(DUMMIES, with_lengths, HookType.AROUND)


def with_lengths(original: Callable[[Any, Any], Any], runner: Any, forward_batch: Any) -> Any:
    """Return SGLang's dummy batch; if it verifies, with equal lengths for all requests."""
    batch = original(runner, forward_batch)
    if batch.forward_mode.is_target_verify() and batch.spec_info is None:
        tokens = len(batch.positions)
        width = tokens // batch.batch_size
        ends = torch.arange(0, tokens + 1, width, dtype=torch.int32, device=batch.positions.device)
        batch.spec_info = verify_input(batch.positions, ragged_layout(ends, tokens), width, False)
    return batch
