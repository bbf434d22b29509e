"""A fake GPU: tensors with shapes and types but no numbers.

Operations that would wait for a GPU raise: reading a number on the host, shapes that depend on numbers (`nonzero`,
masks), and blocking copies. All operations are recorded, to compare runs.

torch without CUDA cannot index tensors on a fake "cuda:0", so the device uses torch's private device type.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, _triton_jit_function_registry

NAME = "absent"


class Event:
    """The part of CUDA's event that the decode step uses. It is never done until somebody waits for it."""

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
"""Prefixes of operations that launch no kernel."""


class Kernels:
    """Triton on a GPU of compute capability 9.0. It tells variants of a kernel apart as Triton does, by argument types,
    alignment of addresses, numbers that are 1 or multiples of 16, and constants; it runs none.

    compiled: variants, in order. launches: kernel launches.
    """

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.launches = 0

    def compile(self, function: JITFunction, key: str, signature: Any, device: int, *_: Any) -> Any:
        self.compiled.append(f"{function.__name__} {key}")
        kernel = SimpleNamespace(function=None, packed_metadata=None, launch_metadata=lambda *_: None, run=self.launch)
        function.device_caches[device][0][key] = kernel
        return kernel

    def launch(self, *_: Any) -> None:
        self.launches += 1

    @staticmethod
    def forget() -> None:
        """Forget all compiled variants, as in a new process."""
        for info in _triton_jit_function_registry.values():
            info.device_caches.clear()


KERNELS = Kernels()


class Copies(TorchDispatchMode):
    """Rejects copies between host and device that wait.

    operations: with their shapes. launches: of kernels and copies. compiled: variants of
    our kernels, on first use.
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
        """True for copies declared non-blocking that go to the host or come from pinned memory."""
        if name == "aten.copy_.default":
            return bool(args[2:3] == (True,) or kwargs.get("non_blocking")) and args[0].device.type == "cpu"
        upload = name == "aten._to_copy.default" and hasattr(args[0], "pinned")
        return upload and bool(kwargs.get("non_blocking"))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, str(func)
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
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Marks the tensor as pinned: fake tensors have no pinned memory."""
    copy = tensor.clone()
    copy.pinned = True
    return copy


def install() -> torch.device:
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
    with FakeTensorMode():
        yield


@contextmanager
def watching() -> Iterator[Copies]:
    """A context in which waiting is an error; yields the record of operations."""
    with Copies() as copies:
        yield copies
