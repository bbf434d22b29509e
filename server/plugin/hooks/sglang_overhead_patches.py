"""SGLang's work around every decode step without the parts that have no effect here. Each costs about one percent of a
small model's step on a CPU."""

import copy
import dataclasses
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any

import zmq
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

OUTPUT = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator"

RECEIVE = "sglang.srt.managers.scheduler_components.request_receiver.sock_recv"
PASSES = "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.increment_decode_cuda_graph_pass"
"""Counts the steps that ran as a CUDA graph and steps that did not; on a CPU none does."""
RESERVE = "sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode"
"""Slots that a step may need; SGLang calls it on its speculative algorithms twice a step."""
NOTHING_THERE, READABLE = zmq.Again(), int(zmq.POLLIN)


def register() -> None:
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler._forward_isolation", _forward_isolation, HookType.AROUND
    )
    HookRegistry.register(f"{OUTPUT}.to_payload", _without_time_stats, HookType.AFTER)
    HookRegistry.register(RECEIVE, _receive_what_is_there, HookType.AROUND)
    HookRegistry.register(RESERVE, cache(lambda original: original()), HookType.AROUND)
    HookRegistry.register(PASSES, lambda *_, **__: None, HookType.REPLACE)


def _without_time_stats(payload: Any, *_: Any, **__: Any) -> Any:
    """Drop the times of stages unless a request ends: only then are they read. Pickled three times on their way to
    HTTP, they are most of a step's output."""
    if payload is not None and not any(payload.finished_reasons):
        payload.time_stats = None
    return payload


def _receive_what_is_there(original: Callable[..., Any], socket: Any, flags: int = 0) -> Any:
    """Check for requests before receiving: most calls, two per step, find none, and an attempt takes longer."""
    if flags and not socket.get(zmq.EVENTS) & READABLE:  # NOBLOCK is the only flag there is
        raise NOTHING_THERE.with_traceback(None)
    return original(socket, flags)


def _forward_isolation(original: Callable[..., Any], scheduler: Any, batch: Any, *, overlap: bool) -> Any:
    if overlap or batch.spec_algorithm.is_none():
        return original(scheduler, batch, overlap=overlap)
    return _Isolation(batch)


class _Isolation:
    """SGLang's isolation for a worker that returns when it is done: undoes the forward's changes to the batch.

    It saves the same fields, from the batch's dictionary instead of one by one, and the same copy of the sampling info,
    without its constructor.
    """

    def __init__(self, batch: Any):
        self.batch = batch

    def __enter__(self) -> None:
        attributes = self.batch.__dict__
        self.saved = {name: attributes[name] for name in _fields() if name in attributes}
        info = self.batch.sampling_info
        if info is not None:
            info.update_penalties()
            self.batch.sampling_info = copy.copy(info)
            self.batch.sampling_info.penalizer_orchestrator = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.batch.__dict__.update(self.saved)


@cache
def _fields() -> tuple[str, ...]:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    return tuple(field.name for field in dataclasses.fields(ScheduleBatch))
