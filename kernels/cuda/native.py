"""The Triton kernels, where Triton is; imported when the first CUDA tensor comes, since a CPU has no use for them."""

import logging
from functools import cache

import torch

logger = logging.getLogger(__name__)


@cache
def available() -> bool:
    """Import the kernels, which registers their operators; False, said once in the log, where Triton is missing."""
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
    """True if the kernels take these: all on CUDA, Triton present."""
    return all(x.device.type == "cuda" for x in tensors) and available()
