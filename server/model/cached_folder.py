"""Folders in the user's cache: made once, checked on every use."""

import hashlib
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

from outrider.storage import replacing

from ..errors import UserError
from ..log_names import SERVER

MANIFEST = "outrider-manifest.json"


def cached(target: Path, fill: Callable[[Path], None], *, what: str, needs: int) -> Path:
    """Return the folder `target`; make or repair it first where needed.

    A lock lets only one process make the folder; the system releases it if the process is killed. Such a process leaves
    no broken folder: a rename publishes the folder when it is complete and on disk.

    fill: writes the files into an empty folder. what: a name of the content, for messages. needs: free bytes needed.
    """
    if is_intact(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{target.name}.lock"):
            if not is_intact(target):  # another process may have made it while we waited for the lock
                _make(target, fill, what, needs)
    except OSError as error:
        raise UserError(
            f"cannot write {what} to {target.parent}: {error.strerror or error}; "
            "set OUTRIDER_CACHE to a folder that can be written"
        ) from error
    return target


def _make(target: Path, fill: Callable[[Path], None], what: str, needs: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < needs:
        raise UserError(
            f"{what} needs {needs // 2**20} MB in {target.parent}, {free // 2**20} MB are free; "
            "set OUTRIDER_CACHE to a folder with more room"
        )
    prefix = f".{target.name}.tmp-"
    for leftover in target.parent.glob(prefix + "*"):  # of a start that was killed; we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    _log(f"Preparing {what} in {target} (once)")
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        fill(temporary)
        files = [path for path in temporary.iterdir() if path.is_file() and not path.is_symlink()]
        checksums = {path.name: sha256(path) for path in sorted(files)}
        (temporary / MANIFEST).write_text(json.dumps({"sha256": checksums}, indent=1))
        temporary.chmod(0o755)
        replacing.sync_tree(temporary)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
        replacing.sync(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def is_intact(target: Path) -> bool:
    """Return True if every file has its original content and every link a target; subfolders are not checked."""
    try:
        expected = json.loads((target / MANIFEST).read_text())["sha256"]
        links = [path for path in target.iterdir() if path.is_symlink()]
        if {path: sha256(target / path) for path in expected} == expected and all(link.exists() for link in links):
            return True
    except (OSError, ValueError, KeyError, TypeError):
        if not target.exists():
            return False
    _log(f"{target} is damaged; it is made again")
    return False


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _locked(path: Path) -> AcquireReturnProxy:
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        _log("Another start is preparing it; waiting")
        return lock.acquire()


def _log(message: str) -> None:
    """Write to the server's log; for other commands to stderr."""
    server = logging.getLogger(SERVER)
    if server.isEnabledFor(logging.INFO) and server.hasHandlers():
        server.info(message)
    else:
        print(message, file=sys.stderr, flush=True)
