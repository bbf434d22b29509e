"""Lets the HTTP process query and command the running worker, by SGLang's internal-state messages."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")

RELOAD = "outrider_reload_profile"
FORGET = "outrider_forget"
USE, DROP_OWNER = "outrider_use_drafter", "outrider_drop_owner"
MEASURE, SERVE = "outrider_measure", "outrider_serve"
LIVE = "outrider_live"
SAVE = "outrider_save"
FAILED = {"outrider_failed": True}
"""Answer of an engine that failed at a question."""


class EngineFailed(RuntimeError):
    """The engine failed at a question or a command, but still serves; its log has the cause."""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.get_internal_state", _get, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.set_internal_state", _set, HookType.AROUND)


def _get(original: Any, scheduler: Any, request: Any) -> Any:
    worker = _worker(scheduler)
    if request.rid == LIVE:
        from sglang.srt.managers.io_struct import GetInternalStateReqOutput

        live = worker.optional.run("questions", FAILED, _live, scheduler, worker)
        return GetInternalStateReqOutput(internal_state=live)
    output = original(scheduler, request)
    if hasattr(worker, "outrider_state"):
        from sglang.srt.runtime_context import get_parallel

        output.internal_state["outrider"] = worker.optional.run("questions", FAILED, worker.outrider_state)
        output.internal_state["outrider_engine"] = get_parallel().dp_rank or 0
    return output


def _worker(scheduler: Any) -> Any:
    """Return our worker, of speculation or of block diffusion; None if there is none."""
    return scheduler.draft_worker if scheduler.dllm_config is None else scheduler.tp_worker.dllm_algorithm


def _live(scheduler: Any, worker: Any) -> dict[str, Any]:
    free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
    dllm = scheduler.dllm_config is not None
    running = scheduler.dllm_manager.waiting_queue if dllm else scheduler.running_batch.reqs
    return worker.outrider_live() | {
        "requests": {"running": len(running), "queued": len(scheduler.waiting_queue)},
        "cache": {"used": scheduler.max_total_num_tokens - free, "size": scheduler.max_total_num_tokens},
    }


def _set(original: Any, scheduler: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    from . import measuring

    worker = _worker(scheduler)
    commands: dict[str, Callable[[Any], None]] = {
        RELOAD: lambda _: worker.reload_profile(),
        FORGET: lambda _: worker.forget_records(),
        USE: lambda folder: _use(scheduler, folder),
        DROP_OWNER: lambda learner: scheduler.draft_worker.drop_owner(learner),
        SAVE: lambda _: worker.save(),
        MEASURE: lambda _: measuring.begin(worker),
        SERVE: lambda _: measuring.end(worker),
    }
    ours = [name for name in request.server_args if name in commands]
    if not ours:
        return original(scheduler, request)
    done = [worker.optional.run("questions", FAILED, commands[name], request.server_args[name]) for name in ours]
    return SetInternalStateReqOutput(updated=FAILED not in done)


def _use(scheduler: Any, folder: str) -> None:
    """Draft with these weights; without running requests, drop cached prefixes, which have the old weights' state.

    Measuring a step shape is given up, because it has replaced the planner.
    """
    from . import measuring

    measuring.end(scheduler.draft_worker)
    scheduler.draft_worker.use_drafter(folder)
    if scheduler.is_fully_idle():
        scheduler.flush_cache()


async def _answered(question: Coroutine[Any, Any, T]) -> T:
    """Wait for the engines' answer, even if the caller is cancelled: SGLang would take a late answer for the next
    question's."""
    return await asyncio.shield(asyncio.ensure_future(question))


async def read(manager: Any) -> dict[str, Any]:
    """Return records of the worker, of several engines the first one's; `manager` is SGLang's tokenizer manager."""
    states = await _answered(manager.get_internal_state())  # in the order in which they were received
    state: dict[str, Any] = min(states, key=lambda state: state["outrider_engine"])["outrider"]
    return _checked(state)


async def read_live(manager: Any) -> list[dict[str, Any]]:
    """Return each engine's counts, planner's curve (`decode/live.py`), requests and cache. It costs the engine a
    fraction of a millisecond."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    answers = await _answered(manager.get_internal_state_communicator(GetInternalStateReq(rid=LIVE)))
    return [_checked(answer.internal_state) for answer in answers]


def _checked(state: dict[str, Any]) -> dict[str, Any]:
    if state == FAILED:
        raise EngineFailed("the engine could not tell its state; its log says why")
    return state


async def command(manager: Any, name: str, value: Any = 1) -> None:
    """Send a command to every engine's worker and wait until it is done. Raises EngineFailed.

    name: RELOAD, FORGET, MEASURE or SERVE; USE a drafter's folder; DROP_OWNER, the data of an owner's learner; SAVE.
    """
    from sglang.srt.managers.io_struct import SetInternalStateReq

    if not all(await _answered(manager.set_internal_state(SetInternalStateReq(server_args={name: value})))):
        raise EngineFailed(f"the engine failed at {name}; its log says why")


@asynccontextmanager
async def measuring(manager: Any) -> AsyncIterator[None]:
    """Let every engine run steps of exact shapes (`measuring.begin`), with none recorded yet; afterwards it serves."""
    try:
        await command(manager, MEASURE)
        yield
    finally:
        await command(manager, SERVE)
