"""Compile the C++ kernels once per machine, into the user's cache directory.

The key of the cache is a hash of the sources, the flags, the compiler and torch's version. A build needs `g++`, torch's
own headers and some minutes of processor time. `python -m outrider.kernels.cpu.build` builds ahead of time, with
--install into the installation itself (a container image's), which then needs no compiler and no cache.
"""

import argparse
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

from ..cache import cache_root

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
INSTALLED = Path(__file__).parent / "built"
LIBRARY = "outrider_kernels.so"
COMMON = ("-std=c++20", "-O3", "-fPIC", "-fno-math-errno")
EXACT = ("-ffp-contract=off",)
"""Flags of the operations: the bits of random numbers must not depend on the target processor."""
_WIDE = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma")
OPERATIONS = (
    ("block",),
    ("chain",),
    ("diffusion",),
    ("products", "forward", "gated_delta"),
    ("ops", "instruction_sets", "noise", "ragged", "lookup", "paths"),
)
"""Sources of the operations. A group is compiled as one, since torch's headers take longer than most sources."""
INSTRUCTION_SETS = {
    "scalar": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avxvnni": ("-mavx2", "-mfma", "-mf16c", "-mavxvnni"),
    "avx512": _WIDE,
    "avx512bf16": (*_WIDE, "-mavx512bf16", "-mavx512vnni"),
}
TILES = {
    "amx": (*INSTRUCTION_SETS["avx512bf16"], "-mamx-tile", "-mamx-bf16"),
    "amx_emulated": ("-O2", "-mfma", "-DEMULATE_TILES", "-Wno-psabi"),  # for tests: -O3 compiles twice as long
}
"""Products and attention by tiles; the rest is another set's. For tests the emulation has the bits of the tile unit."""
CHECK = "check_tiles"
"""A program next to the library, see csrc/check_tiles.cpp; missing where the compiler does not know tiles."""


class BuildError(RuntimeError):
    """The kernels cannot be built here; the message says why."""


def library(extra_flags: tuple[str, ...] = ()) -> Path:
    """Return the compiled library, built if this machine has not built it yet.

    Raises
    ------
    BuildError
        Not x86-64, no compiler, or the compiler failed.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise BuildError(f"they are written for x86-64, this is {platform.machine()}")
    installed = INSTALLED / _key(None, extra_flags) / LIBRARY
    if installed.exists():
        return installed
    compiler = find_compiler()
    folder = cache_root() / "kernels" / _key(compiler, extra_flags)
    target = folder / LIBRARY
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


def install() -> Path:
    """Compile the library into the installation; it is used there while sources and torch stay the same.

    Raises
    ------
    BuildError
        No compiler, or the compiler failed.
    """
    target = INSTALLED / _key(None, ()) / LIBRARY
    target.parent.mkdir(parents=True, exist_ok=True)
    _build(find_compiler(), (), target)
    return target


def find_compiler() -> str:
    """Return the path of the C++ compiler; raises BuildError where there is none."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise BuildError("no C++ compiler was found (g++, or the one in $CXX)")
    return compiler


def _key(compiler: str | None, extra_flags: tuple[str, ...]) -> str:
    """Hash everything that decides the library; compiler: None: any."""
    digest = hashlib.sha256()
    version = ""
    if compiler is not None:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    for part in (torch.__version__, version, *COMMON, *EXACT, *extra_flags, repr(INSTRUCTION_SETS), repr(TILES)):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _build(compiler: str, extra_flags: tuple[str, ...], target: Path) -> None:
    """Compile every object in parallel, the last and longest first, link, and move the results into place at once."""
    logger.warning("compiling the CPU kernels for this machine: half a minute to two, once")
    torch_root = Path(torch.__file__).parent
    base = [compiler, *COMMON, *extra_flags]
    exact = [*base, *EXACT]
    tiles = dict(TILES)
    if not _knows_tiles(compiler):
        del tiles["amx"]
    include = ["-isystem", str(torch_root / "include"), "-fopenmp", *(["-DWITH_AMX"] if "amx" in tiles else [])]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        jobs = {}
        for group in OPERATIONS:
            *first, last = (str(SOURCES / f"{name}.cpp") for name in group)
            before = [word for source in first for word in ("-include", source)]
            jobs[f"{folder}/{group[0]}.o"] = [*exact, *include, *before, "-c", last]
        for source, sets in (("kernels.cpp", INSTRUCTION_SETS), ("tiles.cpp", tiles)):
            for name, flags in sets.items():
                jobs[f"{folder}/{name}.o"] = [*base, *flags, f"-DISA={name}", "-c", str(SOURCES / source)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda job: _run([*jobs[job], "-o", job]), reversed(jobs)))
        if "amx" in tiles:
            objects = [f"{folder}/{name}.o" for name in tiles]
            program = f"{folder}/{CHECK}"
            _run([*base, "-pthread", str(SOURCES / f"{CHECK}.cpp"), *objects, "-o", program])
            os.replace(program, target.with_name(CHECK))
        libraries = [f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10", "-lgomp"]
        built = f"{folder}/{target.name}"
        _run([compiler, "-shared", *extra_flags, *jobs, *libraries, "-o", built])
        os.replace(built, target)


def _knows_tiles(compiler: str) -> bool:
    """Return True if the compiler and its assembler know the instructions of the tile unit."""
    command = [compiler, *TILES["amx"], "-x", "c++", "-c", "-", "-o", os.devnull]
    done = subprocess.run(command, input=b'asm("tdpbf16ps %tmm2, %tmm1, %tmm0");', capture_output=True, check=False)
    return done.returncode == 0


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[:12])
        raise BuildError(f"{' '.join(command[:2])} … failed:\n{tail}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile the CPU kernels, and print where they are.")
    parser.add_argument("--install", action="store_true", help="into the installation, not the user's cache")
    print(install() if parser.parse_args().install else library())
