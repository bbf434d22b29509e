"""The machine's device, fast number formats and free memory."""

import functools
import shutil
import subprocess
from pathlib import Path

import psutil

from ..errors import UserError

_CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@functools.cache
def gpu_count() -> int:
    """Number of GPUs that an NVIDIA driver reports. Does not import torch, which takes seconds."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    try:
        answer = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU") for line in answer.stdout.splitlines()) if answer.returncode == 0 else 0


def has_gpu() -> bool:
    """Return True if there is a GPU."""
    return gpu_count() > 0


def instruction_set() -> str:
    """Return the instruction set of the compiled CPU kernels, or "none"; the first call compiles them, for a minute.

    Raises UserError if the user forces an instruction set that this processor does not run.
    """
    from outrider.kernels.cpu import native

    try:
        return native.instruction_set()
    except ValueError as error:
        raise UserError(str(error)) from None


@functools.cache
def cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split())


def cpu_has_fast_bfloat16() -> bool:
    """Return True if hardware multiplies bfloat16 matrices; elsewhere they are emulated, slower than float32."""
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16"})


def faster_dtype(device: str) -> str:
    """Return the dtype, bfloat16 or float32, in which this device multiplies matrices faster."""
    return "bfloat16" if not device.startswith("cpu") or cpu_has_fast_bfloat16() else "float32"


def available_memory() -> int:
    """Return the bytes that can still be allocated here: the machine's, or the container's where it has less."""
    free = psutil.virtual_memory().available
    for limit_file, used_file in _CGROUP_LIMITS:
        try:
            limit, used = Path(limit_file).read_text().strip(), Path(used_file).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            free = min(free, max(0, int(limit) - int(used)))
        break
    return free


def gpu_memory() -> int:
    """Return the bytes of the first GPU that are free."""
    return int(_ask_first_gpu("memory.free")) * 2**20


def gpu_name() -> str:
    """Return the name of the first GPU by its driver."""
    return _ask_first_gpu("name")


def compute_capability() -> tuple[int, int]:
    """Compute capability of the first GPU: (9, 0) is sm_90."""
    major, _, minor = _ask_first_gpu("compute_cap").partition(".")
    return int(major), int(minor)


def _ask_first_gpu(field: str) -> str:
    answer = subprocess.run(
        ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return answer.stdout.splitlines()[0].strip()
