"""SGLang's graphs of prefills, with hidden states where the drafter reads them.

SGLang captures hidden states for its own block drafters alone. If prefills cannot be captured, the server runs them
without graphs.
"""

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

logger = logging.getLogger(__name__)

CAPTURE = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.capture"


def register() -> None:
    HookRegistry.register(CAPTURE, capture, HookType.AROUND)


def capture(original: Callable[[Any], None], runner: Any) -> None:
    """Capture the graphs of SGLang's prefill `runner`; if that fails, prefills run without graphs."""
    from .verify_graphs import shows_hidden_states  # imports SGLang's runners

    if shows_hidden_states() and runner._uses_eager_prefill_tail():
        runner.capture_hidden_mode = CaptureHiddenMode.FULL
    try:
        original(runner)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        logger.error("prefills run without CUDA graphs, which could not be captured: %s", reason)
        runner.can_run_graph = lambda forward_batch: False
