"""Prefill and decode in separate servers, with the drafter's state sent along.

The prefill server shows its drafter the prompts and never drafts. SGLang sends the keys and values at a request's slots
to slots of the decode server, and a draft model's state too. With ours (`SlotPool`) the decode server drafts as if it
had read the prompt itself. A request that has to leave the decode server's cache takes both along and returns with
them.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from .. import must_take
from ..config import PluginConfig

REQUEST = "sglang.srt.managers.schedule_batch.Req"
DECODE = "sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
TRANSFER = "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager"
PAUSE_SECONDS = 0.001
UNLIKE = "prefill and decode server differ in model, dtype or drafter; start both with the same flags"


def register() -> None:
    """Hook into SGLang, in such servers only: the hooked modules take a second to import."""
    if PluginConfig.from_env().role:
        register_hooks()
        if not torch.cuda.is_available():
            from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

            # SGLang would copy slots' numbers into pinned memory, which needs a GPU.
            must_take.replace(MooncakeKVSender, "supports_host_tensor_indices", False)


def register_hooks() -> None:
    HookRegistry.register(f"{DECODE}.get_new_prebuilt_batch", _admit, HookType.AROUND)
    HookRegistry.register(f"{REQUEST}.offload_kv_cache", _leave, HookType.AROUND)
    HookRegistry.register(f"{REQUEST}.load_kv_cache", _come_back, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.on_idle", _pause, HookType.AROUND)
    HookRegistry.register(f"{TRANSFER}._validate_peer_state_layout", _compare, HookType.AROUND)


def _admit(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    """Register requests that come without a prefill with the worker."""
    from ..decode.requests import transferred_tokens  # imports torch's and SGLang's modules of a scheduler

    batch = original(scheduler, running_batch)
    if batch is not None:
        worker = scheduler.draft_worker
        worker.admit(batch)
        worker.history.write(*transferred_tokens(batch, worker.req_to_token_pool.req_to_token))
        for req in batch.reqs:
            req.outrider_worker = worker
    return batch


def _leave(original: Callable[..., None], req: Any, pool: Any, allocator: Any) -> None:
    """When a request's slots are taken from it, keep its draft state, as SGLang does its keys and values."""
    original(req, pool, allocator)
    req.outrider_worker.optional.run("drafting", None, _keep_state, req, pool)


def _come_back(original: Callable[..., None], req: Any, pool: Any, allocator: Any) -> None:
    """When a request gets new slots, restore its draft state there: they held another request's."""
    original(req, pool, allocator)
    req.outrider_worker.optional.run("drafting", None, _restore_state, req, pool)


def _keep_state(req: Any, pool: Any) -> None:
    state, slots = _state_and_slots(req, pool)
    req.outrider_state = [each[slots].cpu() for each in state]


def _restore_state(req: Any, pool: Any) -> None:
    state, slots = _state_and_slots(req, pool)
    for each, kept in zip(state, req.outrider_state, strict=True):
        each[slots] = kept.to(each.device)
    req.outrider_state = []


def _state_and_slots(req: Any, pool: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the drafter's tensors, and a request's slots in them that hold keys and values."""
    drafter = req.outrider_worker.drafter
    slots = pool.req_to_token[req.kv.req_pool_idx, : req.seqlen - 1].long()
    return [] if drafter is None else drafter.slot_state(), slots


def _pause(original: Callable[..., None], scheduler: Any) -> None:
    """Pause while idle: transfers are polled continuously, on a core that the other server may need."""
    original(scheduler)
    if not scheduler.is_fully_idle():
        time.sleep(PAUSE_SECONDS)


def _compare(original: Callable[..., tuple[bool, str | None]], manager: Any, peer: Any) -> tuple[bool, str | None]:
    """Refuse a decode server with slots of other sizes: SGLang writes by the prefill server's."""
    if list(peer.dst_kv_item_lens) != list(manager.kv_args.kv_item_lens):
        return False, UNLIKE
    return original(manager, peer)
