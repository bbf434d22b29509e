"""Processors, memory, disk, GPU and clock."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from outrider.kernels.cache import cache_root

from ..machine import hardware, threads, topology
from ..settings.settings import Settings
from .finding import Finding, ok, problem, warning

CACHE_BYTES = 1 << 30
"""Room in the cache: the embedded model, kernels and profiles take a tenth of it, a model from the hub many of it."""
TEMPORARY_BYTES = 64 << 20
SOCKET_PATH = 107
"""Bytes of a socket's path, at most: Linux, unix(7)."""
SOCKET_NAME = 60
"""Bytes of it that a server's own folder and the names in it take."""
CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")


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


def memory() -> Iterator[Finding]:
    free, swap = hardware.available_memory(), psutil.swap_memory()
    shown = f"{gib(free)} can be allocated"
    if swap.total and swap.used > swap.total / 2:
        yield warning("memory", f"{shown}, {gib(swap.used)} are swapped out", "end what else takes memory here")
    else:
        yield ok("memory", shown)


def cache() -> Iterator[Finding]:
    yield from _folder("cache", cache_root(), CACHE_BYTES, "set OUTRIDER_CACHE to a folder that can be written")


def temporary() -> Iterator[Finding]:
    folder = Path(tempfile.gettempdir())
    if len(os.fsencode(folder)) + SOCKET_NAME > SOCKET_PATH:
        yield problem("temporary", f"{folder} is too long for the sockets in it", "set TMPDIR to a shorter one")
    else:
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


def clock() -> Iterator[Finding]:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    source = CLOCK_SOURCE.read_text().strip() if CLOCK_SOURCE.exists() else ""
    if time.time() < Path(__file__).stat().st_mtime:
        yield problem("clock", f"{now}, before this program was installed", "set it: `timedatectl set-ntp true`")
    elif source in SLOW_CLOCKS:
        remedy = f"let the kernel use tsc or kvm-clock (see {CLOCK_SOURCE.with_name('available_clocksource')})"
        yield warning("clock", f"{now}; its source {source} is slow to read, which every step does", remedy)
    else:
        yield ok("clock", now)


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
