"""What SGLang 0.5.17, the last that goes with torch 2.11, has otherwise than 0.5.21."""

from __future__ import annotations

from typing import Any


def bridge() -> None:
    """0.5.17 looks for a draft model's KV pool in every worker but its own n-gram one; ours has no draft model."""
    from sglang.srt.mem_cache import kv_cache_builder

    original = getattr(kv_cache_builder, "get_draft_kv_pool", None)
    if original is None:
        return

    def get_draft_kv_pool(*, draft_worker: Any, **others: Any) -> Any:
        if getattr(draft_worker, "draft_worker", draft_worker) is None:
            return None
        return original(draft_worker=draft_worker, **others)

    kv_cache_builder.get_draft_kv_pool = get_draft_kv_pool


def meeting() -> str:
    """Full name of the function in which ranks meet."""
    from sglang.srt.distributed import bootstrap

    name = "init_parallel_runtime" if hasattr(bootstrap, "init_parallel_runtime") else "init_torch_distributed"
    return f"{bootstrap.__name__}.{name}"


def check_schema(schema: Any) -> None:
    """Raise ValueError for what a JSON schema asks for and xgrammar ignores; 0.5.17 cannot tell and refuses nothing."""
    try:
        from sglang.srt.constrained.json_schema_validation import validate_xgrammar_json_schema
    except ImportError:
        return
    validate_xgrammar_json_schema(schema)
