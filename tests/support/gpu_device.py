"""The device of tests/gpu: a GPU, or the host where Triton interprets (TRITON_INTERPRET=1).

Without SGLang, so that kernel tests run on a bare machine.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from hypothesis import HealthCheck, settings

from outrider.kernels.cpu import native as cpu
from outrider.kernels.cuda import native as cuda
from outrider.kernels.sampling import Rules

T = TypeVar("T")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON = torch.device("cpu" if INTERPRETED else "cuda")
HALVES = (torch.float16,) if INTERPRETED else (torch.float16, torch.bfloat16)
"""Half precisions; Triton's interpreter multiplies bfloat16 as integers."""
TYPES = (torch.float32, *HALVES)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest error of a row relative to its norm: a few roundings of the type."""


def missing() -> str | None:
    """Why tests have no GPU here, or None."""
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU, torch finds none"
    if torch.cuda.get_device_capability() < (8, 0):
        return "needs a GPU of compute capability 8.0 or more"
    return None


def examples(count: int = 8) -> settings:
    """`count` examples where Triton interprets, ten times as many on a GPU; the same in every run."""
    return settings(
        max_examples=count if INTERPRETED else 10 * count, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def moved(x: Any, device: torch.device = ON) -> Any:
    """The tensors of tuples and dictionaries on the device, with their strides."""
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)
    if isinstance(x, dict):
        return {key: moved(value, device) for key, value in x.items()}
    if isinstance(x, Rules):
        return Rules(*(moved(value, device) for value in x))
    return [moved(value, device) for value in x] if isinstance(x, tuple | list) else x


def differing(found: Any, expected: Any) -> int:
    """Number of unequal elements of two tensors, or of two rows of tensors."""
    if isinstance(expected, torch.Tensor):
        return int((found.cpu() != expected.cpu()).sum())
    return sum(differing(one, other) for one, other in zip(found, expected, strict=True))


def row_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error of a row relative to its norm; infinite if a result is NaN."""
    difference = (found.cpu().float() - expected).norm(dim=-1)
    return float((difference / expected.norm(dim=-1).clamp_min(1e-6)).nan_to_num(torch.inf).max())


def captured(run: Callable[[], T], pool: Any = None) -> Callable[[], T]:
    """`run` as a CUDA graph: a call replays it and returns the captured results. Interpreted: `run`."""
    if INTERPRETED:
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compile kernels before the capture
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        results = run()

    def replay() -> T:
        graph.replay()
        return results

    return replay


@contextmanager
def triton() -> Iterator[None]:
    """A context in which `outrider.kernels` uses the Triton kernels."""
    if not INTERPRETED:
        yield
        return
    with (
        mock.patch.object(cuda, "fits", return_value=cuda.available()),
        mock.patch.object(cpu, "available", return_value=False),
    ):
        yield


@contextmanager
def nobody_waits() -> Iterator[None]:
    """A context in which every wait for the GPU raises RuntimeError."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
