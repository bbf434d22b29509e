"""Fake tensors on a GPU, without one: shows whether a step would wait for it.

`FakeTensorMode` computes shapes alone; `item()` and `nonzero` raise. torch for CPUs lacks the device guard that
indexing needs, so an empty one is compiled.
"""

import ctypes
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<c10::DeviceType::CUDA>); }
"""


class Recorder(TorchDispatchMode):
    """Records every operation with the shapes of its results; a copy between devices is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = ({x.device.type for x in _tensors(part)} for part in ((args, kwargs), result))
        if "cuda" in given | made and len(given | made) > 1:
            raise AssertionError(f"{func} takes {sorted(given)} and gives {sorted(made)}")
        self.operations.append((str(func), tuple(tuple(x.shape) for x in _tensors(result))))
        return result


@contextmanager
def fake_cuda() -> Iterator[Recorder]:
    """A context with tensors on `cuda:0`; it records all operations on them, and launches of Triton's kernels."""
    from triton.runtime.jit import JITFunction

    _guard()
    with FakeTensorMode(), Recorder() as recorder:

        def launch(kernel: JITFunction, *_: Any, grid: Any, **__: Any) -> None:
            recorder.operations.append((kernel.__name__, ()))

        with mock.patch.object(JITFunction, "run", launch):
            yield recorder


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


@cache
def _guard() -> None:
    if torch.backends.cuda.is_built():
        return
    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "guard.so"
        flags = ["-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10"]
        subprocess.run(["g++", "-x", "c++", "-", "-o", library, *flags], input=GUARD, text=True, check=True)
        ctypes.CDLL(str(library))
