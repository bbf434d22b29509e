"""The compiled kernels, if this machine has them; every caller has a plain torch version for when it has not.

`OUTRIDER_CPU_KERNELS=0` switches them off. `OUTRIDER_CPU_KERNELS_CXXFLAGS` adds compiler flags; the tests of this
folder run under the sanitizers with `-fsanitize=address,undefined` there and the sanitizer's runtime in `LD_PRELOAD`.
"""

from __future__ import annotations

import logging
import os
from functools import cache

import torch

from outrider.kernels.cpu.build import BuildError, library

logger = logging.getLogger(__name__)


@cache
def available() -> bool:
    """Load the compiled kernels, building them the first time; False, said once in the log, where that fails."""
    if os.environ.get("OUTRIDER_CPU_KERNELS", "1") == "0":
        logger.info("CPU kernels are switched off (OUTRIDER_CPU_KERNELS=0): plain torch is used")
        return False
    try:
        extra_flags = tuple(os.environ.get("OUTRIDER_CPU_KERNELS_CXXFLAGS", "").split())
        torch.ops.load_library(str(library(extra_flags)))
    except (BuildError, OSError) as error:
        logger.warning("CPU kernels are not available, plain torch is used, which is slower: %s", error)
        return False
    logger.info("CPU kernels: %s", torch.ops.outrider.instruction_set())
    return True


def instruction_set() -> str:
    """Which of the compiled variants runs here: scalar, avx2, avx512 or avx512bf16."""
    return torch.ops.outrider.instruction_set() if available() else "none"


def fits(*tensors: torch.Tensor) -> bool:
    """Whether the kernels take these: on the CPU, all float32 or all bfloat16, compiled kernels present."""
    dtype = tensors[0].dtype
    for x in tensors:  # a plain loop, the fastest here: this runs before every operation of every layer
        if x.dtype is not dtype or not x.is_cpu:
            return False
    return dtype in (torch.float32, torch.bfloat16) and available()  # last: a GPU machine builds nothing
