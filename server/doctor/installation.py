"""Python, the packages, the compiler and the kernels it makes.

What is imported at the top is Python's own: packages may be missing.
"""

import importlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from .finding import Finding, ok, problem, warning

LOCKS = Path(__file__).resolve().parents[2] / "deploy" / "requirements"
"""The pinned packages, in a checkout."""
REINSTALL = "`make clean install` in a checkout, else the two `pip install` of docs/operate.md"
IMPORTED = ("torch", "transformers", "xgrammar")
"""Packages with compiled parts, which may be there and broken."""
OLDEST = (3, 11)


def python() -> Iterator[Finding]:
    here = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    if sys.version_info < OLDEST:
        yield problem("python", here, "use Python 3.11 or newer: `make PYTHON=python3.11 install`")
    elif sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        yield problem("python", here, "use Linux on x86-64, or a container of it")
    else:
        yield ok("python", here)


def packages(device: str) -> Iterator[Finding]:
    """device: cpu or cuda, whose pinned set it is compared with."""
    try:
        from packaging.requirements import Requirement

        needed = [Requirement(line) for line in requires("outrider") or ()]
    except ImportError as error:  # PackageNotFoundError is one
        yield problem("packages", f"{error}", REINSTALL)
        return
    missing, unfit = [], []
    for requirement in needed:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = _version(requirement.name)
        if found is None:
            missing.append(f"{requirement.name}{requirement.specifier}")
        elif not requirement.specifier.contains(found, prereleases=True):
            unfit.append(f"{requirement.name} {found}, needed {requirement.specifier}")
    for name in IMPORTED if not missing else ():
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a broken package does
            unfit.append(f"{name} cannot be imported: {' '.join(str(error).split()) or repr(error)}")
    if missing:
        yield problem("packages", f"missing: {', '.join(missing)}", REINSTALL)
    if unfit:
        yield problem("packages", "; ".join(unfit), REINSTALL)
    if not missing and not unfit:
        yield from _compare_with_pins(device, len(needed))


def _compare_with_pins(device: str, count: int) -> Iterator[Finding]:
    """The versions that the tests ran with, where this is a checkout; else the ranges alone."""
    names = ("cuda.txt",) if device == "cuda" else ("cpu.txt", "torch-cpu.txt")
    texts = [(LOCKS / name).read_text() for name in names if (LOCKS / name).is_file()]
    pins = [pin for text in texts for pin in re.findall(r"^[\w.-]+==[^\s;\\]+", text, re.MULTILINE)]
    other = []
    for pin in pins:
        name, _, wanted = pin.partition("==")
        found = _version(name)
        if found is None or found.partition("+")[0] != wanted:
            other.append(f"{name} {found or 'missing'}, tested {wanted}")
    if other:
        yield warning("packages", f"not the tested versions: {'; '.join(other)}", REINSTALL)
    else:
        yield ok("packages", f"{len(pins)} as tested" if pins else f"{count} requirements are met")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def kernels() -> Iterator[Finding]:
    """Compiler and compiled CPU kernels; compiles them if that was not done yet, half a minute to two."""
    from outrider.kernels.cpu import build, native

    from ..errors import UserError
    from ..machine import hardware

    try:
        compiler = build.find_compiler()
    except build.BuildError:
        compiler = ""
    else:
        shown = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
        yield ok("compiler", (shown.stdout.splitlines() or [compiler])[0])
    if os.environ.get("OUTRIDER_CPU_KERNELS", "1") == "0":
        yield warning("kernels", "switched off: plain torch, which is slower", "unset OUTRIDER_CPU_KERNELS")
        return
    try:
        chosen, runs = hardware.instruction_set(), native.available()
    except UserError as error:
        yield problem("kernels", str(error), "unset OUTRIDER_CPU_INSTRUCTION_SET, or name one of those")
        return
    if not runs:
        yield from _no_kernels(compiler)
        return
    library = build.library(tuple(os.environ.get("OUTRIDER_CPU_KERNELS_CXXFLAGS", "").split()))
    forced = os.environ.get("OUTRIDER_CPU_INSTRUCTION_SET")
    if forced:
        remedy = "unset OUTRIDER_CPU_INSTRUCTION_SET for the best that the processor runs"
        yield warning("kernels", f"{chosen}, forced; {library}", remedy)
    elif chosen == "scalar":
        yield warning(
            "kernels", f"{chosen}: this processor, or its virtual machine, shows no AVX2", "pass the host's CPU"
        )
    else:
        yield ok("kernels", f"{chosen}; {library}")


def _no_kernels(compiler: str) -> Iterator[Finding]:
    from outrider.kernels.cpu import build

    try:
        build.library()
    except build.BuildError as error:
        reason = " ".join(str(error).split())
    else:
        reason = "the compiled library cannot be loaded"
    remedy = "look at OUTRIDER_CACHE and CXX" if compiler else "install a C++ compiler: `apt-get install g++`"
    yield warning("kernels", f"plain torch is used, which is slower: {reason}", remedy)
