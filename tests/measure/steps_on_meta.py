"""Times decode steps on torch's "meta" device; prints the microseconds of each as JSON. For `host_times.py`.

The worker, its planner and SGLang's sampling run as on a GPU, from the batch to the step's result. Tensors have no
memory, kernels and graphs are launched into nothing, and copies to the host hold constants.
"""

import importlib
import json
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import absent_gpu
import decode_on_absent_gpu as on_absent
import numpy as np
import torch
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from torch._library.custom_ops import OPDEFS
from torch.utils._device import _device_constructors

from outrider.kernels.cuda import native

REQUESTS, KINDS, SIZES, WARM = (1, 8, 32), ("greedy", "sampled"), (1, 2, 4, 8, 32), 50
CONSTANTS = {torch.int64: 1, torch.int32: 1, torch.float32: 0.5}
"""Numbers that arrive on the host, allowed wherever they are read. Every other one of int32, the upper half of an int64
in a packed copy, is 0."""


class Event(absent_gpu.Event):
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class Module(absent_gpu.Module):
    Event = Event


def copied(target: torch.Tensor, source: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
    if source.is_meta and not target.is_meta:
        target.fill_(CONSTANTS[target.dtype])
        if target.dtype == torch.int32:
            target[1::2] = 0
        return target
    return COPY(target, source, *rest, **kwargs)


def created(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    return EMPTY(*args, **kwargs)


def elementwise(first: Any, second: Any, *, alpha: Any = 1) -> torch.Tensor:
    one, other = getattr(first, "shape", ()), getattr(second, "shape", ())
    shape = one if one == other or not other else torch.broadcast_shapes(one, other)
    return EMPTY(shape, dtype=torch.result_type(first, second), device="meta")


def new(like: torch.Tensor, size: Any = None, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return EMPTY(like.shape if size is None else size, dtype=dtype or like.dtype, device="meta")


def stacked(parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    shape = [*parts[0].shape]
    return EMPTY([*shape[:dim], len(parts), *shape[dim:]], dtype=parts[0].dtype, device="meta")


def joined(parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    shape = [*parts[0].shape]
    shape[dim] = sum(part.shape[dim] for part in parts)
    return EMPTY(shape, dtype=parts[0].dtype, device="meta")


SHAPES = dict.fromkeys(("minimum", "add.Tensor", "sub.Tensor", "mul.Tensor"), elementwise)
SHAPES |= {"new_empty": new, "empty_like": new, "stack": stacked, "cat": joined}
"""Operations for which torch finds the shape in Python, in more time than a GPU's launch takes."""
COPY, EMPTY = torch.Tensor.copy_, torch.empty


def install() -> torch.device:
    """Make "meta" pass for a GPU, with kernels that are prepared and not run; for the rest of this process."""
    publish(ServerArgs(model_path="dummy", device="cpu"), role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    absent_gpu.install()
    absent_gpu.watching = nullcontext
    native.available()
    meta = torch.library.Library("outrider_cuda", "IMPL")
    for name, function in operators().items():
        meta.impl(name, function, "Meta", allow_override=True)
    torch.Tensor.pin_memory = lambda tensor: tensor
    _device_constructors()  # lists torch.empty, before it changes
    torch.Tensor.copy_, torch.empty = copied, created
    torch.get_device_module = lambda *_: Module
    native.fits = lambda *tensors: all(tensor.is_meta for tensor in tensors)
    aten = torch.library.Library("aten", "IMPL")
    for name, function in SHAPES.items():
        aten.impl(name, function, "Meta", allow_override=True)
    install.kept = meta, aten
    return torch.device("meta")


def operators() -> dict[str, Any]:
    """Our operators' functions by name, in older trees; now they are no operators of torch."""
    try:
        functions = importlib.import_module("outrider.kernels.cuda.operators").FUNCTIONS
    except ImportError:
        functions = {name: made._backend_fns[None] for name, made in OPDEFS.items() if name.startswith("outrider_cuda")}
    return {name.partition("::")[2]: function for name, function in functions.items()}


def times(kind: str, requests: int, steps: int, device: torch.device, *, drafts: bool) -> list[float]:
    """Microseconds of each step. drafts: the model drafts in every step; False: speculation is off for all."""
    rows, lengths, replays = np.arange(1, requests + 1), [20] * requests, on_absent.Replays()
    replays.record = lambda run: (replays.replay, run())
    at = SimpleNamespace(numpy=lambda: rows)
    with mock.patch.multiple(on_absent, GRAPHS=SIZES, POOL=80, create=True):
        worker = on_absent.make_worker("dspark in graphs", "asynchronous", device, replays.record)
    worker._target_worker.forward_batch_generation = lambda batch, **_: replays.forward(worker, batch)
    if drafts:
        drafting(worker.planning.planner)
    batch = on_absent.batch_of(kind, lengths, at, device)
    worker.requests.admit(batch.reqs, batch.req_pool_indices, rows)
    for req in batch.reqs:
        req.sampling_params.max_new_tokens = 1 << 20
    worker.requests.limits *= drafts
    made = []
    for _ in range(WARM + steps):
        began = time.perf_counter()
        result = worker._decode(batch, published, None)
        if outcome := getattr(result.logits_output, "auxiliary_device_output", None):
            outcome.copy_to_host(to_host).consume(None, [])
        made.append((time.perf_counter() - began) * 1e6)
        batch.spec_info = result.next_draft_input
    return made[WARM:]


def drafting(planner: Any) -> None:
    """Show the planner that whole drafts are accepted, and draft in all steps, its first ones included."""
    decide, observe = planner.budget, planner.observe

    def budget(view: Any) -> Any:
        decided = decide(view)
        room = int(view.limits.sum())
        return decided if decided.draft else type(decided)(draft=True, tokens=room, seconds=decided.seconds)

    def observed(finished: Any) -> None:
        lens = np.full_like(finished.verify_lens, planner.gamma)
        survival = np.full_like(finished.survival, 0.9)
        observe(replace(finished, verify_lens=lens, accept_lens=lens + 1, survival=survival, looked_up=None))

    planner.budget, planner.observe = budget, observed


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """SGLang's copy of a result."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def published(seq_lens: torch.Tensor) -> None:
    """SGLang's callback, of nothing."""


def main(steps: int) -> None:
    device, found = install(), {}
    with torch.inference_mode():
        for drafts in (True, False):
            for kind in KINDS:
                for requests in REQUESTS:
                    name = f"{'drafted' if drafts else 'undrafted'}, {kind}, {requests}"
                    found[name] = times(kind, requests, steps, device, drafts=drafts)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
