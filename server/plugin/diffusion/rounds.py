"""The rounds of SGLang's dllm scheduler, in which every request computes its next blocks.

SGLang's own rounds read one block of a prompt each, stall decoding requests while there are prompts, spend a forward on
a finished block alone, reserve no room for coming tokens, and lose pages of requests that are aborted between rounds.
Here a round has, of each request, the final blocks that are not in the cache yet, as many as `chunked_prefill_size`
allows, followed by its open block. A finished block is sent at once; its keys and values are computed again together
with the next open block. Between rounds a request owns only final keys and values. Where there is no room for all open
blocks, the youngest request gives its own up and waits.
"""

import dataclasses
from array import array
from collections.abc import Callable
from typing import Any

from sglang.srt.dllm.mixin.req import ReqDllmMixin
from sglang.srt.dllm.mixin.scheduler import SchedulerDllmMixin
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.managers.scheduler_components.metrics_reporter import QueueCount
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from .. import must_take
from .algorithm import StepOutcome

REPORT = 40
"""Rounds after which requests and cache are reported even if no prompt was read and no answer ended, as SGLang does
with decode steps."""


def register() -> None:
    must_take.replace(ReqDllmMixin, "_init_fill_ids_for_dllm", _lay_out)
    must_take.replace(ReqDllmMixin, "determine_dllm_phase", lambda req: None)  # a round takes the requests it finds
    must_take.replace(PrefillAdder, "_init_dllm_meta", _set_budget)
    # A request waits until there is room.
    must_take.replace(SchedulerDllmMixin, "_fetch_waiting_reqs", lambda scheduler: None)
    must_take.replace(SchedulerDllmMixin, "_process_dllm_batches", _take_requests)
    must_take.replace(SchedulerDllmMixin, "process_batch_result_dllm", _process_results)
    must_take.replace(SchedulerDllmMixin, "finish_dllm_forward", lambda scheduler, req: None)  # `_process_results`
    must_take.replace(TpModelWorker, "_forward_batch_generation_dllm", _run)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.abort_request", _abort, HookType.AROUND)


def known(req: Any) -> "array[int]":
    """Return prompt and answer so far."""
    return req.origin_input_ids + req.output_ids


def _lay_out(req: Any) -> None:
    """Put the open block, with its masks, after the final ones."""
    config, tokens = req.dllm_config, known(req)
    start = len(tokens) // config.block_size * config.block_size
    state = req.dllm_algo_state
    if not state:
        masks = config.block_size - (len(tokens) - start)
        state = tokens[start:] + array("q", [config.mask_id] * masks)
    req.full_untruncated_fill_ids = tokens[:start] + state


def _set_budget(adder: Any, config: Any) -> None:
    """Set the tokens of a round: a chunk of prefill, and at least a block of every request."""
    adder.dllm_block_size = config.block_size
    chunk = adder.rem_input_tokens if adder.rem_chunk_tokens is None else adder.rem_chunk_tokens
    adder.rem_dllm_tokens = max(chunk, config.max_running_requests * config.block_size)


def _room(adder: Any) -> int:
    """Return the tokens that the cache has room for."""
    cache = adder.tree_cache
    return int(cache.token_to_kv_pool_allocator.available_size() + cache.evictable_size())


def _add(adder: Any, req: Any) -> bool:
    """Take as many whole blocks of a request into the round as fit; False: none."""
    start, block = req.prefix_len, adder.dllm_block_size
    room = min(adder.rem_dllm_tokens, _room(adder) - adder.memory_budget.current_offset)
    length = min(_unread(req), max(0, room) // block * block)
    if not length:
        return False
    req.extend_end = start + length
    adder.can_run_list.append(req)
    adder.rem_dllm_tokens -= length
    adder.memory_budget.current_offset += length
    adder.log_input_tokens += max(0, min(start + length, len(req.origin_input_ids)) - start)
    return True


def _take_requests(scheduler: Any, adder: Any, running_batch: Any) -> Any:
    """Fill a round: with requests that decode, then requests with more to read, then new ones."""
    running = scheduler.dllm_manager.waiting_queue
    _make_room(scheduler, adder, running)
    for req in sorted(running, key=lambda req: _unread(req) > 2 * adder.dllm_block_size):
        _add(adder, req)
    promised = sum(_wanted(adder, req) for req in running)
    while scheduler.waiting_queue and len(running) < scheduler.dllm_config.max_running_requests:
        req = scheduler.waiting_queue[0]
        req.init_next_round_input(scheduler.tree_cache)
        req.lock = scheduler.tree_cache.lock(req.last_node)  # its cached prefix is not evictable from here on
        promised += _wanted(adder, req)
        if (running and _room(adder) < promised) or not _add(adder, req):
            scheduler.tree_cache.unlock(req.lock)
            req.lock = None
            break
        adder._account_prefill_cache_admission(req, req.prefix_len)
        adder.log_hit_tokens += req.prefix_len
        running.append(scheduler.waiting_queue.pop(0))
    return ForwardMode.DLLM_EXTEND


def _unread(req: Any) -> int:
    """Count the tokens that are not in the cache, including the open block's."""
    return len(req.full_untruncated_fill_ids) - req.prefix_len


def _wanted(adder: Any, req: Any) -> int:
    """Estimate the tokens that a request needs beyond its tokens in the cache."""
    return _unread(req) + int(adder._get_running_request_total_token_offset(req))


def _make_room(scheduler: Any, adder: Any, running: list[Any]) -> None:
    """Give up the youngest requests until the next open block of every other fits."""
    most = 2 * adder.dllm_block_size
    while len(running) > 1 and _room(adder) < sum(min(most, _unread(req)) for req in running):
        _give_up(scheduler, running.pop())


def _give_up(scheduler: Any, req: Any) -> None:
    """Free a running request's cache; it waits, and is computed again."""
    if req.kv.holds_kv:
        _release(scheduler, req)
    req.reset_for_retract()
    reporter = scheduler.metrics_reporter
    if reporter.enable_metrics:
        reporter.metrics_collector.increment_retracted_reqs(
            num_retracted_reqs=1,
            num_retracted_input_tokens=len(req.origin_input_ids),
            num_retracted_output_tokens=len(req.output_ids),
        )
    scheduler._add_request_to_queue(req, is_retracted=True)
    scheduler.waiting_queue.insert(0, scheduler.waiting_queue.pop())  # it has waited before


def _abort(original: Callable[..., None], scheduler: Any, abort_request: Any) -> None:
    """Abort as SGLang does, plus a reason for the client of a running request, and without leaking its pages."""
    from sglang.srt.managers.scheduler import _make_abort_req

    for req in scheduler.dllm_manager.pop_aborted_reqs(abort_request.abort_all, abort_request.rid):
        scheduler._release_aborted_request(req)
        notice = _make_abort_req(req, finished_reason=abort_request.finished_reason)
        scheduler.send_abort_output(notice, req)
        if req.kv.holds_kv:
            _release(scheduler, req)
    original(scheduler, abort_request)


def _run(worker: Any, forward_batch: Any, batch: Any = None) -> Any:
    outcomes = worker.dllm_algorithm.generate(worker.model_runner, forward_batch, batch)
    return GenerationBatchResult(
        logits_output=None, next_token_ids=[], dllm_algo_state=outcomes, can_run_cuda_graph=False
    )


def _process_results(scheduler: Any, batch: Any, result: Any) -> None:
    outcomes: list[StepOutcome] = result.dllm_algo_state
    allocator, answered, generated = scheduler.token_to_kv_pool_allocator, [], 0
    allocator.free_group_begin()
    for req, outcome in zip(batch.reqs, outcomes, strict=True):
        kept = outcome.kept
        for block in outcome.complete:
            if not req.finished():
                generated += _answer(req, block)
        if outcome.committed and not req.finished():  # an answer's end may be within the block
            block = outcome.complete[0]
            req.full_untruncated_fill_ids[kept : kept + len(block)] = array("q", block)
            kept += len(block)
        _keep(scheduler, req, kept)
        req.dllm_algo_state = array("q", outcome.open) if outcome.open else None
        if outcome.complete:
            answered.append(req)
            if req.finished():
                _end(scheduler, req)
    ended = any(req.finished() for req in answered)
    if ended:
        scheduler.tp_worker.dllm_algorithm.flush()
    if answered:
        scheduler.output_streamer.stream_output(answered, batch.return_logprob)
    allocator.free_group_end()
    _report(scheduler, batch, generated, ended)


def _report(scheduler: Any, batch: Any, generated: int, ended: bool) -> None:
    """Report a round to Prometheus; SGLang counts its dllm rounds as prefills, and no answer's tokens."""
    reporter, stats = scheduler.metrics_reporter, batch.prefill_stats
    reporter.num_generated_tokens += generated
    if generated and reporter.current_scheduler_metrics_enabled:
        reporter.metrics_collector.increment_realtime_tokens(
            decode_tokens=generated, dp_cooperation_info=batch.dp_cooperation_info
        )
    if not (ended or stats.log_input_tokens or stats.log_hit_tokens or scheduler.forward_ct % REPORT == 0):
        return
    running = QueueCount.from_reqs(scheduler.dllm_manager.waiting_queue, scheduler.enable_priority_scheduling)
    reporter.report_prefill_stats(
        batch=batch,
        prefill_stats=dataclasses.replace(stats, num_running_reqs=running),
        can_run_cuda_graph=False,
        dp_cooperation_info=batch.dp_cooperation_info,
    )


def _answer(req: Any, state: list[int]) -> int:
    """Add a complete block, without the prompt's part of it, to the answer; return how many tokens longer that is."""
    before, new = len(req.output_ids), state[len(known(req)) % len(state) :]
    req.output_ids.extend(new)
    req.update_finish_state(new_accepted_len=len(new))
    return len(req.output_ids_through_stop) - before


def _end(scheduler: Any, req: Any) -> None:
    if req.kv.holds_kv:
        _release(scheduler, req)
    req.time_stats.set_completion_time()


def _release(scheduler: Any, req: Any) -> None:
    """Free a request's cache; its final part stays in the prefix cache."""
    req.full_untruncated_fill_ids = known(req)  # without the open block's masks
    release_kv_cache(req, scheduler.tree_cache, checkpoint=True)


def _keep(scheduler: Any, req: Any, kept: int) -> None:
    """Free all slots after the first `kept` tokens, and add the rest to the prefix cache."""
    cache, kv = scheduler.tree_cache, req.kv
    if kept < kv.kv_allocated_len:
        cache.free_kv_row(kv, [(kept, kv.kv_allocated_len)])
    kv.kv_committed_len = kv.kv_allocated_len = kept
    if kept > req.prefix_len and not req.finished():  # `_release` adds an ended answer's
        req.extend_end = kept
        scheduler.stash_chunked_request(req)
    if not kept:  # SGLang expects a row of the pool only for a request with slots
        scheduler.req_to_token_pool.free(req)
