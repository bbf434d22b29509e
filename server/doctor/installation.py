"""Checks of Python, the packages, the compiler and the compiled kernels.

The module imports only the standard library, since packages may be missing.
"""

import importlib
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from .finding import Finding, ok, problem, warning

REINSTALL = "`make clean install` in a checkout, else the two `pip install` of docs/operate.md"
IMPORTED = ("torch", "transformers", "xgrammar")
"""Packages with compiled parts, which may be installed but broken."""
OLDEST = (3, 11)


def python() -> Iterator[Finding]:
    here = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    if sys.version_info < OLDEST:
        yield problem("python", here, "use Python 3.11 or newer: `make PYTHON=python3.11 install`")
    elif sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        yield problem("python", here, "use Linux on x86-64, or a container of it")
    else:
        yield ok("python", here)


def packages() -> Iterator[Finding]:
    try:
        from packaging.requirements import Requirement

        needed = [Requirement(line) for line in requires("outrider") or ()]
    except ImportError as error:  # includes PackageNotFoundError
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
        except Exception as error:  # a broken package may raise anything
            unfit.append(f"{name} cannot be imported: {' '.join(str(error).split()) or repr(error)}")
    if missing:
        yield problem("packages", f"missing: {', '.join(missing)}", REINSTALL)
    if unfit:
        yield problem("packages", "; ".join(unfit), REINSTALL)
    if not missing and not unfit:
        yield ok("packages", f"{len(needed)} requirements are met")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def kernels() -> Iterator[Finding]:
    """The CPU kernels; compiles them if necessary, which takes half a minute to two."""
    from outrider.kernels.cpu import build, native

    from ..errors import UserError
    from ..machine import hardware

    if os.environ.get("OUTRIDER_CPU_KERNELS", "1") == "0":
        yield warning("kernels", "switched off: plain torch, which is slower", "unset OUTRIDER_CPU_KERNELS")
        return
    try:
        chosen, library = hardware.instruction_set(), build.library(native.extra_flags())
    except UserError as error:
        yield problem("kernels", str(error), "unset OUTRIDER_CPU_INSTRUCTION_SET, or name one of those")
    except build.BuildError as error:
        reason, remedy = " ".join(str(error).split()), "install a C++ compiler (`apt-get install g++`), look at CXX"
        yield warning("kernels", f"plain torch is used, which is slower: {reason}", remedy)
    else:
        if not native.available():
            yield warning("kernels", f"{library} cannot be loaded; plain torch is used", "delete it, it is made anew")
        elif chosen == "scalar":
            yield warning("kernels", f"{chosen}: the processor shows no AVX2", "pass the host's CPU through")
        else:
            yield ok("kernels", f"{chosen}; {library}")
