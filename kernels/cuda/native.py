"""The Triton kernels, if they can run; `native.NAME` is the module NAME of this folder, imported at its first use."""

import logging
from functools import cache
from importlib import import_module
from typing import Any

import torch

logger = logging.getLogger(__name__)


@cache
def available() -> bool:
    """Return True if Triton is installed; else log it once."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        logger.warning("Triton kernels are not available, plain torch is used, which is slower: %s", error)
        return False
    return True


def fits(*tensors: torch.Tensor) -> bool:
    """Return True if the kernels can run: all tensors on CUDA, Triton installed."""
    return all(x.device.type == "cuda" for x in tensors) and available()


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return globals().setdefault(name, import_module(f".{name}", __package__))
