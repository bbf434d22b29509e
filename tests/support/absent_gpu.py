"""A device that is not there: tensors on it have shapes and types, and no numbers.

What would wait for a real one has no answer here, so it raises: a number read on the host, a shape that depends on
numbers (`nonzero`, masks), a copy from one side to the other that is not the asynchronous one of pinned memory. What is
asked of it is written down, so that two runs can be compared.

torch without CUDA cannot index tensors on a fake "cuda:0"; so this is a device of torch's own private type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, _triton_jit_function_registry

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


FREE = "aten.empty", "aten.new_empty", "prim."
"""Beginnings of operations that a GPU is not asked for."""


class Kernels:
    """Triton on a GPU of compute capability 9.0: it tells variants of a kernel apart as ever, by types, alignment of
    addresses, numbers that are 1 or multiples of 16, and constants. It compiles and runs none.

    compiled: variants in the order in which they would have been compiled. launches: of kernels.
    """

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.launches = 0

    def compile(self, function: JITFunction, key: str, signature: Any, device: int, *_: Any) -> Any:
        self.compiled.append(f"{function.__name__} {key}")
        found = SimpleNamespace(function=None, packed_metadata=None, launch_metadata=lambda *_: None, run=self.launch)
        function.device_caches[device][0][key] = found
        return found

    def launch(self, *_: Any) -> None:
        self.launches += 1

    @staticmethod
    def forget() -> None:
        """Every variant has to be compiled again, as in a new process."""
        for info in _triton_jit_function_registry.values():
            info.device_caches.clear()


KERNELS = Kernels()


class Copies(TorchDispatchMode):
    """Rejects copies between the host and the device that wait.

    operations: what ran, with its shapes; of our operators, what they are made of. launches: kernels and copies that a
    GPU would be asked for. compiled: variants of our kernels that had not been asked for before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, list[torch.Size], list[torch.Size]]] = []
        self._others = 0
        self._before = KERNELS.launches, len(KERNELS.compiled)

    @property
    def launches(self) -> int:
        return self._others + KERNELS.launches - self._before[0]

    @property
    def compiled(self) -> list[str]:
        return KERNELS.compiled[self._before[1] :]

    def _count(self, func: Any, name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        on_device = any(leaf.device.type == NAME for leaf in (*given, *made))
        self._others += on_device and not func.is_view and not name.startswith(FREE)

    @staticmethod
    def _is_asynchronous(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
        """A copy that is said to be, to the host, or from pinned memory."""
        if name == "aten.copy_.default":
            return bool(args[2:3] == (True,) or kwargs.get("non_blocking")) and args[0].device.type == "cpu"
        upload = name == "aten._to_copy.default" and hasattr(args[0], "pinned")
        return upload and bool(kwargs.get("non_blocking"))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, str(func)
        if name.startswith("outrider_cuda."):
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
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
    fake_tensor.CONSTANT_NUMEL_LIMIT = 0  # the device cannot keep the number of a tensor of one
    FakeTensor.data_ptr = lambda tensor: tensor.storage_offset() * tensor.element_size()  # memory begins aligned
    JITFunction._do_compile = lambda function, *arguments: KERNELS.compile(function, *arguments)
    here = {"get_current_target": GPUTarget("cuda", 90, 32), "get_current_device": 0, "get_current_stream": 0}
    driver.set_active(SimpleNamespace(**{name: lambda *_, value=value: value for name, value in here.items()}))
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
