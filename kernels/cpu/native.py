"""The compiled kernels, if this machine has them; every caller has a plain torch version for machines without.

`OUTRIDER_CPU_KERNELS=0` switches them off. `OUTRIDER_CPU_KERNELS_CXXFLAGS` adds compiler flags, with which `make
check-sanitizers` runs the tests of this folder under the sanitizers. `OUTRIDER_CPU_INSTRUCTION_SET` forces one of the
compiled variants.
"""

import contextlib
import logging
import os
import signal
import subprocess
from functools import cache
from pathlib import Path

import torch

from ..cache import cache_root
from .build import CHECK, BuildError, library

logger = logging.getLogger(__name__)

SECONDS = 60
"""Time limit of the trial of tiles."""


@cache
def available() -> bool:
    """Load the compiled kernels, building them the first time; False, logged once, where that fails."""
    if os.environ.get("OUTRIDER_CPU_KERNELS", "1") == "0":
        logger.info("CPU kernels are switched off (OUTRIDER_CPU_KERNELS=0): plain torch is used")
        return False
    try:
        built = library(extra_flags())
        torch.ops.load_library(str(built))
    except (BuildError, OSError) as error:
        logger.warning("CPU kernels are not available, plain torch is used, which is slower: %s", error)
        return False
    _choose_instruction_set(built)
    logger.info("CPU kernels: %s", torch.ops.outrider.instruction_set())
    return True


def extra_flags() -> tuple[str, ...]:
    """Return the compiler flags that the environment adds."""
    return tuple(os.environ.get("OUTRIDER_CPU_KERNELS_CXXFLAGS", "").split())


def _choose_instruction_set(built: Path) -> None:
    """Use the forced instruction set, else tiles where they are proved, else the library's default.

    Raises
    ------
    ValueError
        The forced one is unknown, or this processor does not run it.
    """
    runs, forced = torch.ops.outrider.instruction_sets(), os.environ.get("OUTRIDER_CPU_INSTRUCTION_SET")
    if forced and forced not in runs:
        raise ValueError(f"OUTRIDER_CPU_INSTRUCTION_SET is {forced}, this processor runs {', '.join(runs)}")
    if forced:
        torch.ops.outrider.use_instruction_set(forced)
    elif "amx" in runs and tiles_proved(built):
        torch.ops.outrider.use_instruction_set("amx")


def tiles_proved(built: Path) -> bool:
    """Return True if products by the processor's tile unit (`amx`) have the bits of its emulation.

    The trial is a program next to `built`, run in its own process, since a mistake would be an illegal instruction. Its
    result is kept in the user's cache; a failure is logged in each process.
    """
    program, answer = built.with_name(CHECK), cache_root() / "kernels" / built.parent.name / f"{CHECK}.answer"
    try:
        objection = answer.read_text()
    except OSError:
        objection = _objection(program)
        with contextlib.suppress(OSError):  # a cache that cannot be written: each process tries
            answer.parent.mkdir(parents=True, exist_ok=True)
            fresh = answer.with_suffix(f".{os.getpid()}")  # several processes of one server start at once
            fresh.write_text(objection)
            fresh.replace(answer)
    if objection:
        logger.warning("the tile unit (amx) is not used, which is slower: %s (remembered in %s)", objection, answer)
    return not objection


def _objection(program: Path) -> str:
    """Return the reason of a failed trial, in one line; empty where it passed."""
    try:
        done = subprocess.run([program], capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its check could not be run: {error}"
    if done.returncode < 0:
        return f"its check ended with {signal.Signals(-done.returncode).name}"
    return f"its check said: {' '.join(done.stderr.split())}" if done.returncode else ""


def instruction_set() -> str:
    """Return the compiled variant that runs here, the same for all operations.

    scalar, avx2, avxvnni, avx512, avx512bf16, or amx: products of many rows and attention by tiles, the rest as
        avx512bf16. amx_emulated, for tests, has the bits of amx on any processor with FMA, slowly. none: plain torch.
        Bits differ between variants, and weights packed for one do not fit another.
    """
    return torch.ops.outrider.instruction_set() if available() else "none"


def fits(*tensors: torch.Tensor) -> bool:
    """Return True if the kernels take these: on the CPU, all float32 or all bfloat16, compiled kernels present."""
    dtype = tensors[0].dtype
    for x in tensors:  # a plain loop is the fastest
        if x.dtype is not dtype or not x.is_cpu:
            return False
    return dtype in (torch.float32, torch.bfloat16) and available()  # last: no build on a GPU machine
