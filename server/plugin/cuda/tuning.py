"""The forward on dummies by which SGLang has FlashInfer choose kernels at start: a verification of equal lengths.

SGLang makes its input for its own algorithms alone, and without one our attention backends know no lengths.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ..spec_inputs import uniform_verify

DUMMIES = "sglang.srt.model_executor.model_runner.ModelRunner.prepare_dummy_forward_batch"


def register() -> None:
    HookRegistry.register(DUMMIES, with_lengths, HookType.AROUND)


def with_lengths(original: Callable[[Any, Any], Any], runner: Any, forward_batch: Any) -> Any:
    """SGLang's dummy batch; one that verifies has an input of ours."""
    batch = original(runner, forward_batch)
    if batch.forward_mode.is_target_verify() and batch.spec_info is None:
        batch.spec_info = uniform_verify(batch.positions, batch.batch_size)
    return batch
