"""SGLang's grammars, replaced by bounded ones (`outrider.server.plugin.grammars`)."""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

MAKE = "sglang.srt.constrained.base_grammar_backend.create_grammar_backend"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"


def register() -> None:
    HookRegistry.register(MAKE, _make, HookType.AROUND)
    HookRegistry.register(f"{RESULTS}._accept_grammar_tokens", _accept, HookType.AROUND)
    HookRegistry.register(f"{RESULTS}._apply_prefill_grammar", _accept_first, HookType.AROUND)


def _make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Imported here: when plugins are loaded, SGLang's modules that it needs are not importable yet.
    from sglang.srt.constrained import xgrammar_backend

    from ..grammars.backend import BoundedBackend, bound

    xgrammar_backend.XGrammarGrammarBackend = BoundedBackend
    backend = original(*args, **kwargs)
    if backend is not None:
        bound(backend)
    return backend


def _accept(original: Callable[..., list[int]], processor: Any, req: Any, tokens: Any) -> list[int]:
    from ..grammars.backend import end_if_too_slow

    retained = original(processor, req, tokens)
    return [] if end_if_too_slow(req) else retained


def _accept_first(original: Callable[..., None], processor: Any, *, req: Any, **others: Any) -> None:
    from ..grammars.backend import end_if_too_slow

    original(processor, req=req, **others)
    end_if_too_slow(req)
