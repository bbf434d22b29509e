"""Environments of their own for engines whose packages cannot stand beside ours; each is made once, in the cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.kernels.cache import cache_root

from ..errors import UserError
from ..model.cached_folder import cached

LOCKS = Path(__file__).resolve().parents[2] / "deploy" / "requirements"
"""peers-ENGINE.txt there pins the packages of an engine."""


ROOM = 4 * 2**30
"""Bytes that the largest of them takes, and some more."""


def lock_of(engine: str) -> Path:
    return LOCKS / f"peers-{engine}.txt"


def folder(engine: str) -> Path:
    """Where the environment stands: another one for every lock and version of Python."""
    try:
        lock = lock_of(engine).read_bytes()
    except OSError:
        raise UserError(f"the {engine} arm needs {lock_of(engine)}, which comes with a checkout of Outrider") from None
    key = hashlib.sha256(lock + sys.version.encode()).hexdigest()[:16]
    return cache_root() / "peers" / f"{engine}-{key}"


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def commands(engine: str, target: Path) -> list[list[str]]:
    """What makes the environment in `target`, an empty folder; pip's settings hold (PIP_INDEX_URL, pip.conf)."""
    pip = [str(python_of(target)), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    return [[sys.executable, "-m", "venv", str(target)], [*pip, "-r", str(lock_of(engine))]]


def surroundings() -> dict[str, str]:
    """The variables that an environment's Python runs with: nothing of ours on its path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONSAFEPATH": "1"}


def prepare(engine: str) -> Path:
    """The Python of the engine's environment, made first if need be (a few minutes).

    Raises
    ------
    UserError
        It cannot be made.
    """

    def fill(into: Path) -> None:
        for command in commands(engine, into):
            _run(engine, command)

    return python_of(cached(folder(engine), fill, what=f"the environment of the {engine} arm", needs=ROOM))


def _run(engine: str, command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=surroundings(), check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["no reason given"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1]).removeprefix("ERROR: ")
        raise UserError(
            f"the environment of the {engine} arm could not be made: {reason}; "
            f"it needs a package index that pip reaches, or leave {engine} out of --arms"
        )
