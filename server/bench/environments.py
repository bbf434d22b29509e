"""Environments of their own for engines whose packages cannot stand beside ours; each is made once, in the cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outrider.kernels.cache import cache_root
from outrider.server.errors import UserError

LOCKS = Path(__file__).resolve().parents[2] / "deploy" / "requirements"
"""peers-ENGINE.txt there pins the packages of an engine."""


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
    """The Python of the engine's environment, made first if need be.

    The folder appears by one rename, when it is complete; of two that are made at once, one stays. Raises UserError
    where it cannot be made.
    """
    target = folder(engine)
    if python_of(target).exists():
        return python_of(target)
    print(f"Installing {engine} into {target} (a few minutes, once)", file=sys.stderr, flush=True)
    made = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
        for command in commands(engine, made):
            _run(engine, command)
        if not target.exists():
            made.rename(target)
    except OSError as error:
        raise UserError(
            f"cannot make the environment of the {engine} arm in {target.parent}: {error.strerror or error}; "
            "set OUTRIDER_CACHE to a folder that can be written"
        ) from error
    finally:
        if made:
            shutil.rmtree(made, ignore_errors=True)
    return python_of(target)


def _run(engine: str, command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=surroundings(), check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["no reason given"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1]).removeprefix("ERROR: ")
        raise UserError(
            f"the environment of the {engine} arm could not be made: {reason}; "
            f"it needs a package index that pip reaches, or leave {engine} out of --arms"
        )
