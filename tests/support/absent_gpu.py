"""A device that is not there: tensors on it have shapes and types, and no numbers.

What would wait for a real one has no answer here, so it raises: a number read on the host, a shape that depends on
numbers (`nonzero`, masks), a copy from one side to the other that is not the asynchronous one of pinned memory. What is
asked of it is written down, so that two runs can be compared.

torch without CUDA cannot index tensors on a fake "cuda:0"; so this is a device of torch's own private type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "absent"


class Event:
    """The part of CUDA's event that the decode step uses. It never fires, unless somebody waits."""

    waited = 0

    def __init__(self, enable_timing: bool = False):
        self.enable_timing = enable_timing

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("the host waits for an event")


class Stream:
    def wait_event(self, event: Event) -> None:
        pass


class Module(_DummyBackendModule):
    Event, Stream = Event, Stream

    @staticmethod
    @contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        yield


KERNELS = {"draft_step": 5, "accept": 7, "attention": 2}
"""Launches of our operators, where they are not one; at most, as with a split cache and with q."""
REQUESTS = {"draft_step": 0, "accept": 0, "attention": 4, "flatten": 0, "admit": 0}
"""The argument with a row for each request, of operators whose kernels depend on their number; acceptance's on whether
it is even alone."""
FREE = "aten.empty", "aten.new_empty", "prim."
"""Beginnings of operations that a GPU is not asked for."""


class Copies(TorchDispatchMode):
    """Rejects copies between the host and the device that wait.

    operations: what ran, with its shapes. launches: kernels and copies that a GPU would be asked for. variants: of our
    operators, whose kernels Triton would compile: by what is given, and the power of two above the requests and whether
    these are even.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, list[torch.Size], list[torch.Size]]] = []
        self.launches = 0
        self.variants: set[str] = set()

    def _count(self, func: Any, name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        on_device = any(leaf.device.type == NAME for leaf in (*given, *made))
        if on_device and not func.is_view and not name.startswith(FREE):
            self.launches += KERNELS.get(name.removeprefix("outrider_cuda.").removesuffix(".default"), 1)

    @staticmethod
    def _is_asynchronous(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
        """A copy that is said to be, to the host, or from pinned memory."""
        if name == "aten.copy_.default":
            return bool(args[2:3] == (True,) or kwargs.get("non_blocking")) and args[0].device.type == "cpu"
        upload = name == "aten._to_copy.default" and hasattr(args[0], "pinned")
        return upload and bool(kwargs.get("non_blocking"))

    def _note(self, name: str, args: tuple) -> None:
        if name.startswith("outrider_cuda."):
            short = name.split(".")[1]
            count = len(args[REQUESTS[short]]) if short in REQUESTS else 0
            power = 0 if short == "accept" else count and 1 << (count - 1).bit_length()
            width = [*args[0].shape[1:]][-1:]
            self.variants.add(f"{name} {power} {count % 2} {width} {' '.join(map(_kind, args))}")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, str(func)
        self._note(name, args)
        out = func(*args, **kwargs)
        given, made = [*_tensors((*args, *kwargs.values()))], [*_tensors((out,))]
        devices = {leaf.device.type for leaf in (*given, *made) if leaf.dim() or leaf.device.type != "cpu"}
        if len(devices) > 1 and not self._is_asynchronous(name, args, kwargs):
            raise AssertionError(f"{name} waits: it has tensors on {' and '.join(sorted(devices))}")
        if name.startswith("aten.index_put") and devices == {NAME} and not args[2].dim():
            raise AssertionError(
                f"{name} waits: torch copies a number to CUDA before it writes it (index_fill_ does not)"
            )
        self._count(func, name, given, made)
        self.operations.append((name, [leaf.shape for leaf in given], [leaf.shape for leaf in made]))
        return out


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those among the values and in their lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _kind(value: Any) -> str:
    """A tensor by its type, a number not at all, another value as it is."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """The fake mode has no pinned memory."""
    found = tensor.clone()
    found.pinned = True
    return found


def install() -> torch.device:
    """The device, for this process."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(…, device) is made on the host, and copied
    torch.Tensor.pin_memory = _pinned
    return torch.device(f"{NAME}:0")


@contextmanager
def running() -> Iterator[None]:
    """A context in which tensors are fake."""
    with FakeTensorMode():
        yield


@contextmanager
def watching() -> Iterator[Copies]:
    """A context in which nothing may wait; yields what ran."""
    with Copies() as copies:
        yield copies
