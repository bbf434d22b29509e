"""The device under test: its clock, its graphs, and how it is told that nobody may wait.

`Cuda` is what is checked. `Interpreted` runs the same checks on a CPU through Triton's interpreter, at sizes that it
can do: there the checks themselves are tried, and its times mean nothing.
"""

from __future__ import annotations

import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import UserError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Device(ABC):
    """on: torch's name of it. tiny: sizes for trying the checks. types: of activations. environment: of processes that
    run beside the checks."""

    on: torch.device
    tiny: bool
    types: tuple[torch.dtype, ...]
    environment: dict[str, str]

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What it is, and the versions of what runs on it."""

    @abstractmethod
    def synchronise(self) -> None:
        """Wait for it; raises where it is lost."""

    @abstractmethod
    def release(self) -> None:
        """Leave other processes the memory that is free here."""

    @abstractmethod
    def used(self) -> int:
        """Bytes of its memory that any process holds."""

    @abstractmethod
    def pool(self) -> Any:
        """Memory that graphs share: what one has left there lasts until another is replayed."""

    @abstractmethod
    def graph(self, run: Callable[[], T], pool: Any = None) -> Callable[[], T]:
        """`run`, captured: a call replays it, and gives what it made, anew but at the same place."""

    @abstractmethod
    def seconds(self, run: Callable[[], object], calls: int = 10) -> float:
        """Median of a call's time on the device, by replays of a graph of `calls` calls."""

    @abstractmethod
    def launch_seconds(self, run: Callable[[], object]) -> float:
        """Median of a call's time without a graph, back to back."""

    @abstractmethod
    def nobody_waits(self) -> AbstractContextManager[None]:
        """A context in which whatever waits for the device raises."""

    @abstractmethod
    def triton(self) -> AbstractContextManager[None]:
        """A context in which the functions of `outrider.kernels` take the Triton kernels for this device's tensors."""


class Cuda(Device):
    REPLAYS = 12

    def __init__(self, *, tiny: bool):
        import torch

        if not torch.cuda.is_available():
            raise UserError(f"no CUDA device: torch {torch.__version__} finds none; --device cpu tries the checks")
        self.on, self.tiny = torch.device("cuda", torch.cuda.current_device()), tiny
        self.environment = dict(os.environ)
        self.types = (torch.float32, torch.float16, torch.bfloat16)
        if torch.cuda.get_device_capability() < (8, 0):
            raise UserError("the GPU must have compute capability 8.0 or more; torch finds an older one")

    def about(self) -> dict[str, Any]:
        import torch
        import triton

        found = torch.cuda.get_device_properties(self.on)
        return {
            "device": found.name, "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count, "memory": found.total_memory, "l2": found.L2_cache_size,
            "torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__, "tiny": self.tiny,
        }  # fmt: skip

    def synchronise(self) -> None:
        import torch

        torch.cuda.synchronize()

    def release(self) -> None:
        import torch

        torch.cuda.empty_cache()

    def used(self) -> int:
        import torch

        free, whole = torch.cuda.mem_get_info()
        return whole - free

    def graph(self, run: Callable[[], T], pool: Any = None) -> Callable[[], T]:
        import torch

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles kernels and makes handles, which capture may not
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            made = run()

        def replay() -> T:
            graph.replay()
            return made

        return replay

    def pool(self) -> Any:
        import torch

        return torch.cuda.graph_pool_handle()

    def seconds(self, run: Callable[[], object], calls: int = 10) -> float:
        def several() -> None:
            for _ in range(calls):
                run()

        return self._median(self.graph(several)) / calls

    def launch_seconds(self, run: Callable[[], object]) -> float:
        def several() -> None:
            for _ in range(100):
                run()

        several()
        return self._median(several) / 100

    def _median(self, run: Callable[[], object]) -> float:
        import torch

        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.REPLAYS)]
        run()
        for begin, end in pairs:
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3

    @contextmanager
    def nobody_waits(self) -> Iterator[None]:
        import torch

        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @contextmanager
    def triton(self) -> Iterator[None]:
        yield


class Interpreted(Device):
    """Needs to be made before Triton is imported."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        os.environ |= {"TRITON_INTERPRET": "1", "OUTRIDER_CPU_KERNELS": "0"}
        import torch

        self.on, self.tiny = torch.device("cpu"), True
        self.types = (torch.float32, torch.float16)  # it multiplies bfloat16 as integers
        torch.set_num_threads(1)

    def about(self) -> dict[str, Any]:
        import torch
        import triton

        return {
            "device": "Triton's interpreter",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "tiny": True,
        }

    def synchronise(self) -> None:
        pass

    def release(self) -> None:
        pass

    def used(self) -> int:
        return 0

    def graph(self, run: Callable[[], T], pool: Any = None) -> Callable[[], T]:
        return run

    def pool(self) -> Any:
        return None

    def seconds(self, run: Callable[[], object], calls: int = 10) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def launch_seconds(self, run: Callable[[], object]) -> float:
        return self.seconds(run)

    @contextmanager
    def nobody_waits(self) -> Iterator[None]:
        yield

    @contextmanager
    def triton(self) -> Iterator[None]:
        from outrider.kernels.cuda import native

        fits, native.fits = native.fits, lambda *tensors: native.available()
        try:
            yield
        finally:
            native.fits = fits


def make(name: str, *, tiny: bool) -> Device:
    """Raises UserError where there is no such device."""
    return Cuda(tiny=tiny) if name == "cuda" else Interpreted()
