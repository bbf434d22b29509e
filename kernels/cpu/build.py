"""Compile the C++ kernels once per machine, into the user's cache directory.

The key of the cache is a hash of the sources, the flags, the compiler and torch's version; a build is a few seconds
of `g++` and needs nothing but torch's own headers. `python -m outrider.kernels.cpu.build` builds ahead of time.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from outrider.kernels.cache import cache_root

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
COMMON = ("-std=c++20", "-O3", "-fPIC", "-fno-math-errno")
_WIDE = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma")
INSTRUCTION_SETS = {
    "scalar": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": _WIDE,
    "avx512bf16": (*_WIDE, "-mavx512bf16", "-mavx512vnni"),
}


class BuildError(RuntimeError):
    """The kernels cannot be built here; the message says why."""


def library(extra_flags: tuple[str, ...] = ()) -> Path:
    """The compiled library, built if this machine has not built it yet.

    Raises
    ------
    BuildError
        Not x86-64, no compiler, or the compiler failed.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise BuildError(f"they are written for x86-64, this is {platform.machine()}")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise BuildError("no C++ compiler (g++, or what $CXX names) was found")
    folder = cache_root() / "kernels" / _key(compiler, extra_flags)
    target = folder / "outrider_kernels.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several processes of one server start at once
            if not target.exists():
                _build(compiler, extra_flags, target)
    except OSError as error:
        raise BuildError(f"cannot write to {folder}: {error}") from error
    return target


def _key(compiler: str, extra_flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    for part in (torch.__version__, version, *COMMON, *extra_flags, repr(INSTRUCTION_SETS)):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _build(compiler: str, extra_flags: tuple[str, ...], target: Path) -> None:
    """Compile every object side by side, link, and move the result into place at once."""
    logger.warning("compiling the CPU kernels for this machine: half a minute, once")
    torch_root = Path(torch.__file__).parent
    base = [compiler, *COMMON, *extra_flags]
    include = ["-isystem", str(torch_root / "include"), "-fopenmp"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        jobs = [
            (f"{folder}/{name}.o", [*base, *include, "-c", str(SOURCES / f"{name}.cpp")])
            for name in ("ops", "products", "layer", "ragged")
        ]
        for name, flags in INSTRUCTION_SETS.items():
            command = [*base, *flags, f"-DISA={name}", "-c", str(SOURCES / "kernels.cpp")]
            jobs.append((f"{folder}/{name}.o", command))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda job: _run([*job[1], "-o", job[0]]), jobs))
        libraries = [f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10", "-lgomp"]
        built = f"{folder}/{target.name}"
        _run([compiler, "-shared", *extra_flags, *(job[0] for job in jobs), *libraries, "-o", built])
        os.replace(built, target)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[:12])
        raise BuildError(f"{' '.join(command[:2])} … failed:\n{tail}")


if __name__ == "__main__":
    print(library())
