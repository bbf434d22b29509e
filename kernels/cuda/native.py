"""Imports the Triton kernels, if Triton is installed, at the first CUDA tensor: a CPU does not use them."""

import logging
from functools import cache

import torch

logger = logging.getLogger(__name__)


@cache
def available() -> bool:
    """Import the kernels, which registers their operators; without Triton log it once and return False."""
    try:
        from . import (  # noqa: F401
            acceptance,
            admission,
            attention,
            draft_block,
            drafts,
            experts,
            lookup,
            noise,
            ragged,
            rotated,
        )
    except ImportError as error:
        logger.warning("Triton kernels are not available, plain torch is used, which is slower: %s", error)
        return False
    return True


def fits(*tensors: torch.Tensor) -> bool:
    """Return True if the kernels can run: all tensors on CUDA, Triton installed."""
    return all(x.device.type == "cuda" for x in tensors) and available()
