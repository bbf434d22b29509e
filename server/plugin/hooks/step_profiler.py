"""Breakdown of the time of an engine step, for `outrider bench micro steps --breakdown`.

Installed only where the environment variable `OUTRIDER_STEP_LOG` names a file. Every moment of the scheduler's thread
belongs to one part: a function that is timed passes on to its caller what is not its own. One line of JSON per step.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ENV = "OUTRIDER_STEP_LOG"

PRODUCTS, ATTENTION, SMALL, SAMPLING = "products", "attention", "norms, rope, cache", "sampling"
DRAFT, PLAN, COMMIT = "draft", "plan", "commit"
FORWARD, WORKER, SCHEDULER = "forward, rest", "worker, rest", "scheduler"
PARTS = (PRODUCTS, ATTENTION, SMALL, DRAFT, PLAN, SAMPLING, COMMIT, FORWARD, WORKER, SCHEDULER)
COMPILED = (PRODUCTS, ATTENTION, SMALL, SAMPLING)
"""Parts in the order of kernels/cpu/csrc/ops.h, whose operations time themselves."""


class Stopwatch:
    """clock: seconds; with one thread its CPU time, which does not count the time that others held the core.
    compiled: seconds that our operations spent since the last call, by part.
    """

    def __init__(self, clock: Callable[[], float], compiled: Callable[[], dict[str, float]] = dict):
        self.clock, self.compiled = clock, compiled
        self.stack = [SCHEDULER]
        self.spent: dict[str, float] = defaultdict(float)
        self.last = clock()

    def timed(self, part: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._charge()
            self.stack.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._charge()
                self.stack.pop()

        return wrapper

    def lap(self) -> dict[str, float]:
        """Seconds by part since the last lap."""
        self._charge()
        spent, self.spent = dict(self.spent), defaultdict(float)
        return spent

    def _charge(self) -> None:
        now = self.clock()
        elsewhere = self.compiled()
        self.spent[self.stack[-1]] += now - self.last - sum(elsewhere.values())
        for part, seconds in elsewhere.items():
            self.spent[part] += seconds
        self.last = now


class StepLog:
    """Around the scheduler's `run_batch`: a step lasts until the next one begins, so that nothing is left out."""

    def __init__(self, path: Path):
        self.file = path.open("a", buffering=1)
        self.watch: Stopwatch | None = None
        self.step: dict[str, Any] | None = None

    def run_batch(self, original: Callable, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self.watch is None:
            self.watch = self._install()
        seconds = self.watch.lap()
        if self.step is not None:
            self.file.write(json.dumps(self.step | {"seconds": seconds}) + "\n")
        self.step = {"requests": len(batch.reqs), "tokens": 0, "prefill": batch.forward_mode.is_extend()}
        return original(scheduler, batch, *args, **kwargs)

    def _install(self) -> Stopwatch:
        """Late, when the classes are there anyway, and torch knows its threads."""
        from sglang.srt.managers.tp_worker import TpModelWorker
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        from outrider.kernels.cpu import native

        from ..cpu.direct_forward import DirectForward
        from ..decode.planning import Planning
        from ..decode.sampling import Sampling
        from ..decode.worker import SpeculativeWorker

        def compiled() -> dict[str, float]:
            return dict(zip(COMPILED, torch.ops.outrider.time_spent(True), strict=True)) if native.available() else {}

        compiled()
        watch = Stopwatch(_clock(), compiled)
        for owner, name, part in (
            (MHATokenToKVPool, "set_kv_buffer", SMALL),
            (Sampling, "accept", SAMPLING),
            (Sampling, "draw", SAMPLING),
            (Planning, "begin", PLAN),
            (Planning, "admit", PLAN),
            (SpeculativeWorker, "_draft", DRAFT),
            (SpeculativeWorker, "_commit", COMMIT),
            (TpModelWorker, "forward_batch_generation", FORWARD),
            (DirectForward, "verify", FORWARD),
            (SpeculativeWorker, "forward_batch_generation", WORKER),
        ):
            setattr(owner, name, watch.timed(part, getattr(owner, name)))
        for owner, name in ((TpModelWorker, "forward_batch_generation"), (DirectForward, "verify")):
            setattr(owner, name, self._counting_tokens(getattr(owner, name)))
        return watch

    def _counting_tokens(self, forward: Callable) -> Callable:
        """`forward`, which also notes the tokens of its batch."""

        def wrapper(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if self.step is not None:
                self.step["tokens"] = batch.input_ids.numel()
            return forward(worker, batch, *args, **kwargs)

        return wrapper


def _clock() -> Callable[[], float]:
    """A clock in seconds. It waits for a GPU's launched work, so that each part has its own work's time."""
    if not torch.cuda.is_available():
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def waiting() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return waiting


def install_if_asked() -> None:
    path = os.environ.get(ENV)
    if not path:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    log = StepLog(Path(path))
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", log.run_batch, HookType.AROUND)
