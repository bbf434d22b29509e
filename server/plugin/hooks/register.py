"""Registers all our hooks with SGLang; called once in each of its processes."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from outrider.kernels.ragged import write_page_table

from .. import must_take, node_consistency, worker_rpc
from ..config import PluginConfig
from ..loading import stated
from . import (
    answer_ends,
    disaggregation,
    draft_memory,
    grammars,
    prompt_chunks,
    prompt_logits,
    request_guard,
    sglang_overhead_patches,
)

PLATFORM_ONLY = "OUTRIDER_PLATFORM_ONLY"
"""Set to 1, SGLang gets only the parts it needs to start on a CPU: for comparison."""
ASSIGN = "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func"


def register() -> None:
    if os.environ.get(PLATFORM_ONLY) == "1":
        return
    with must_take.fatal_failures():
        _register_all()


def _register_all() -> None:
    prompt_logits.install_if_asked()
    _register_algorithm()
    worker_rpc.register()
    request_guard.register()
    node_consistency.register()
    grammars.register()
    answer_ends.register()
    disaggregation.register()
    prompt_chunks.register()
    _load_one_tokenizer()
    _widen_page_table()
    _leave_room_for_a_step()
    _register_gguf_loader()
    stated.register()
    if (target := PluginConfig.from_env().diffusion) is not None:
        from ..diffusion import models

        models.register(target)
    if not torch.cuda.is_available():
        from ..cpu import adapters, fused_ops, recurrent_models, text_models

        _register_cpu_attention()
        sglang_overhead_patches.register()
        HookRegistry.register(ASSIGN, _assign_req_to_token_pool, HookType.REPLACE)
        fused_ops.register()
        adapters.register()
        recurrent_models.register()
        text_models.register()
    else:
        from ..cuda import norms, prefill_graphs, tuning

        draft_memory.register()
        norms.register()
        tuning.register()
        prefill_graphs.register()
        _register_gpu_attention()
        _capture_verification()
        _allow_adapters()


def _register_algorithm() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from .algorithm import NAME, OutriderAlgorithm

    @SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=OutriderAlgorithm)
    def worker_class(server_args: Any) -> type:
        from sglang.srt.runtime_context import get_parallel

        from ..decode.follower import FollowerWorker
        from ..decode.worker import SpeculativeWorker

        return FollowerWorker if get_parallel().tp_rank else SpeculativeWorker


def _load_one_tokenizer() -> None:
    """Load the tokenizer of a scheduler's process once: SGLang loads it twice, for scheduler and worker, over a second
    each."""
    load = Once()
    for module in ("scheduler", "tp_worker"):
        HookRegistry.register(f"sglang.srt.managers.{module}.get_tokenizer", load, HookType.AROUND)


def _widen_page_table() -> None:
    """Make room in the page table for the slots of two steps.

    A decode step reserves slots for two steps after a request's tokens. SGLang's page table has room for one step
    beyond the context, so at its end the slots would be written into the next request's row.
    """

    def room(original: Callable[[], int]) -> int:
        from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

        return max(original(), get_alloc_reserve_per_decode())

    sizing = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"
    HookRegistry.register(sizing, room, HookType.AROUND)


def _leave_room_for_a_step() -> None:
    """End answers before the cache is full, like answers that reach their length. In a cache not larger than the
    context, SGLang aborts a request that leaves no slots for a decode step."""
    worker = "sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info"
    HookRegistry.register(worker, end_before_the_cache, HookType.AROUND)


def end_before_the_cache(original: Callable[..., tuple[Any, ...]], worker: Any) -> tuple[Any, ...]:
    """Lower the longest request that SGLang's worker reports to its scheduler, so that a step's slots remain."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    info = list(original(worker))
    info[LONGEST] = min(info[LONGEST], info[CACHE] - get_alloc_reserve_per_decode())
    return tuple(info)


CACHE, LONGEST = 0, 4
"""Indices of the cache's and of the longest request's tokens in `TpModelWorker.get_worker_info`."""


class Once:
    """Wraps a function: returns its first result again for the same arguments."""

    def __init__(self) -> None:
        self._returned: dict[str, Any] = {}

    def __call__(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key = repr((args, sorted(kwargs.items())))
        if key not in self._returned:
            self._returned[key] = original(*args, **kwargs)
        return self._returned[key]


def _register_gguf_loader() -> None:
    def get_model_loader(original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
        from ..loading import more_models
        from ..loading.gguf_loader import loader_for_gguf  # imports SGLang's layers

        more_models.register()
        if model_config is not None and not torch.cuda.is_available():
            from ..cpu import llama4, recurrent_models, text_models

            llama4.adapt(model_config)
            recurrent_models.adapt(model_config)
            text_models.adapt(model_config)
        return loader_for_gguf(original, load_config, model_config)

    HookRegistry.register("sglang.srt.model_loader.loader.get_model_loader", get_model_loader, HookType.AROUND)


def _register_cpu_attention() -> None:
    # SGLang calls support_triton(name), which is true for every name but this one and intel_amx, and then launches
    # Triton kernels: so our backend takes the name.
    from sglang.srt.arg_groups import model_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    # SGLang refuses gpt-oss on torch's attention, which has neither sinks nor windows; ours has both.
    must_take.replace(model_hook, "attention_backends_of", lambda view: ("intel_amx", "intel_amx"))

    @register_attention_backend("torch_native")
    def backend(runner: Any) -> Any:
        from ..cpu import recurrent_models

        return recurrent_models.backend_of(runner)


def _register_gpu_attention() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    from ..attention_backends import OURS
    from ..cuda import padding

    original = ATTENTION_BACKENDS["flashinfer"]
    for name in padding.LEAVING:
        register_attention_backend(name)(partial(padding.zeroed, ATTENTION_BACKENDS[name]))

    @register_attention_backend("flashinfer")
    def flashinfer(runner: Any) -> Any:
        if runner.use_mla_backend:
            return original(runner)
        from ..cuda.flashinfer import RaggedFlashInferBackend

        return RaggedFlashInferBackend(runner, init_new_workspace=runner.init_new_workspace)

    @register_attention_backend(OURS)
    def ours(runner: Any) -> Any:
        from ..flat_attention import FlatAttentionBackend

        return FlatAttentionBackend(runner)

    add_attention_backend_choices([OURS])


def _capture_verification() -> None:
    """Let SGLang capture CUDA graphs of the target's verification, which it does for its own algorithms only."""
    os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact"

    def runner_class(original: Callable[[Any], type], runner: Any) -> type:
        from ..attention_backends import buckets_of

        if buckets_of(runner, runner.decode_num_tokens_per_req()) is None:
            return original(runner)
        from ..cuda.verify_graphs import VerifyGraphRunner  # imports SGLang's runners

        return VerifyGraphRunner

    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}._decode_cuda_graph_runner_cls", runner_class, HookType.AROUND)


def _allow_adapters() -> None:
    """Allow LoRA adapters together with our speculation, on SGLang's Triton kernels."""
    from sglang.srt.arg_groups import lora_hook
    from sglang.srt.lora.backend import lora_registry

    def backend() -> type:
        from ..cuda.adapters import RaggedLoRABackend

        return RaggedLoRABackend

    must_take.replace(lora_hook, "check_lora_speculative_compatibility", lambda server_args: None)
    lora_registry.LORA_SUPPORTED_BACKENDS["triton"] = backend


def _assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write freshly allocated slots into positions start..end of each request's page table row."""
    write_page_table(req_to_token, req_pool_indices, start_offset, end_offset, out_cache_loc)
