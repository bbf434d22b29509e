"""Checks of processors, disk and GPU."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from outrider.kernels.cache import cache_root

from ..machine import hardware, threads, topology
from ..settings.settings import Settings
from .finding import Finding, ok, problem, warning

CACHE_BYTES = 1 << 30
"""Free space wanted for the cache. The embedded model, kernels and profiles take a tenth of it; a model from the hub
takes many times as much."""
TEMPORARY_BYTES = 64 << 20


def processors() -> Iterator[Finding]:
    here = topology.here()
    quota = "" if here.quota is None else f", a quota of {here.quota:g} processors"
    nodes = f" on {here.nodes} NUMA nodes" if here.nodes > 1 else ""
    shown = f"{len(here.cores)} cores, {len(here.cpus)} hardware threads{nodes}{quota}"
    computing, load = threads.default(here), psutil.getloadavg()[0]
    if here.quota is not None and here.quota < len(here.cores) and here.quota != int(here.quota):
        yield warning("processors", shown, "make the quota a whole number: the rest of it keeps no thread busy")
    elif computing > len(here.cores):
        remedy = "unset OMP_NUM_THREADS, or make it at most the number of cores"
        yield warning("processors", f"{shown}, but OMP_NUM_THREADS={computing}", remedy)
    elif load > len(here.cpus) / 2:
        remedy = "find them with `top`; steps wait for the slowest thread"
        yield warning("processors", f"{shown}; others keep {load:.1f} of them busy", remedy)
    else:
        yield ok("processors", f"{shown}; {computing} threads would compute")


def cache() -> Iterator[Finding]:
    yield from _folder("cache", cache_root(), CACHE_BYTES, "set OUTRIDER_CACHE to a folder that can be written")


def temporary() -> Iterator[Finding]:
    folder = Path(tempfile.gettempdir())
    yield from _folder("temporary", folder, TEMPORARY_BYTES, "set TMPDIR to a folder that can be written")


def _folder(subject: str, folder: Path, needs: int, remedy: str) -> Iterator[Finding]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"1")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield problem(subject, f"{folder} cannot be written: {error.strerror or error}", remedy)
        return
    if free < needs:
        yield problem(subject, f"{folder} has room for {gib(free)}, {gib(needs)} are needed", remedy + ", or make room")
    else:
        yield ok(subject, f"{folder}, {gib(free)} free")


def gpu(settings: Settings) -> Iterator[Finding]:
    count = hardware.gpu_count()
    if not count:
        if Path("/dev/nvidia0").exists() or Path("/proc/driver/nvidia").exists():
            answer = _first_line(["nvidia-smi", "-L"]) or "nvidia-smi is not there"
            remedy = "install the driver's tools, or start the container with --gpus all"
            yield problem("gpu", f"there is one, but its driver does not answer: {answer}", remedy)
        else:
            yield ok("gpu", "none; a CPU serves")
        return
    import torch

    driver = _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    shown = f"{count} × {hardware.gpu_name()}, driver {driver}, {gib(hardware.gpu_memory())} free on the first"
    if settings.resolved_device == "cpu":
        yield ok("gpu", f"{shown}; not used (--device cpu)")
    elif torch.version.cuda is None:
        yield problem("gpu", f"{shown}, but torch is made for CPUs", "`OUTRIDER_DEVICE=cuda make install`")
    elif not torch.cuda.is_available():
        remedy = f"update the driver to one for CUDA {torch.version.cuda}; look at CUDA_VISIBLE_DEVICES"
        yield problem("gpu", f"{shown}, but torch cannot use it", remedy)
    else:
        yield ok("gpu", f"{shown}, CUDA {torch.version.cuda}")


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout + done.stderr).partition("\n")[0].strip()


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
