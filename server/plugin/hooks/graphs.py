"""CUDA graphs of the target's verification, which SGLang captures for its own algorithms alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


def register() -> None:
    os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact"
    HookRegistry.register(f"{RUNNER}._decode_cuda_graph_runner_cls", _runner_class, HookType.AROUND)


def _runner_class(original: Callable[[Any], type], runner: Any) -> type:
    from ..attention_backends import buckets_of

    if buckets_of(runner, runner.decode_num_tokens_per_req()) is None:
        return original(runner)
    from ..cuda.verify_graphs import VerifyGraphRunner  # imports SGLang's runners

    return VerifyGraphRunner
