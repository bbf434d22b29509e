"""The trial of the tile kernels (`amx`) against their emulation, once before they are used by default."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from pathlib import Path

from ..cache import cache_root
from .build import CHECK

logger = logging.getLogger(__name__)

SECONDS = 60
"""Limit of the trial."""


def tiles_proved(library: Path) -> bool:
    """True if products by the processor's tile unit have the bits of its emulation.

    The trial is a program beside `library`, run in a process of its own, since a mistake would be an illegal
    instruction. Its result is kept in the user's cache; a failure is logged in each process.
    """
    program, answer = library.with_name(CHECK), cache_root() / "kernels" / library.parent.name / f"{CHECK}.answer"
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
    """The reason of a failed trial, in one line; empty where it passed."""
    try:
        done = subprocess.run([program], capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its check could not be run: {error}"
    if done.returncode < 0:
        return f"its check ended with {signal.Signals(-done.returncode).name}"
    return f"its check said: {' '.join(done.stderr.split())}" if done.returncode else ""
