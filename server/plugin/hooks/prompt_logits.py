"""Logits of a prompt's tokens over the whole vocabulary, written to a file for `tests/measure/rounding.py`.

Installed only where the environment variable `OUTRIDER_PROMPT_LOGITS` names a file. For every prompt with requested
logprobs, the rows [tokens, V] float32 are appended, from the first of these logprobs on.
"""

import os
from pathlib import Path
from typing import Any

ENV = "OUTRIDER_PROMPT_LOGITS"


def install_if_asked() -> None:
    path = os.environ.get(ENV)
    if not path:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def get_logits(original: Any, processor: Any, hidden: Any, head: Any, metadata: Any, **others: Any) -> Any:
        logits = original(processor, hidden, head, metadata, **others)
        if metadata.extend_return_logprob:
            with Path(path).open("ab") as file:
                file.write(logits.float().cpu().numpy().tobytes())
        return logits

    name = "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits"
    HookRegistry.register(name, get_logits, HookType.AROUND)
