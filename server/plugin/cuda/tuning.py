"""Gives lengths to SGLang's dummy verification, with which FlashInfer tunes its kernels at start.

SGLang creates `spec_info` for its own algorithms only; without it our attention backends have no lengths.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ..spec_inputs import uniform_verify

DUMMIES = "sglang.srt.model_executor.model_runner.ModelRunner.prepare_dummy_forward_batch"


def register() -> None:
    HookRegistry.register(DUMMIES, with_lengths, HookType.AROUND)


def with_lengths(original: Callable[[Any, Any], Any], runner: Any, forward_batch: Any) -> Any:
    """Return SGLang's dummy batch; if it verifies, with equal lengths for all requests."""
    batch = original(runner, forward_batch)
    if batch.forward_mode.is_target_verify() and batch.spec_info is None:
        batch.spec_info = uniform_verify(batch.positions, batch.batch_size)
    return batch
