"""The folder of a running server, for the sockets between its processes and for their metrics.

The server removes it at its end; if it is killed, the next server does.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

PREFIX = "outrider-run-"
GRAMMARS = "grammars"
"""Subfolder of compiled grammars: `outrider.server.plugin.grammars.folder`."""
LINK_PREFIX = "elsewhere-"
"""Prefix of links to files that are removed with the folder."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder for this user alone, locked while this process lives: the system drops the lock whatever ends it."""

    path: Path
    _lock: int

    @classmethod
    def make(cls) -> Self:
        """Make the folder, and remove folders of this user's killed servers."""
        for path in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
            _remove_if_stale(path)
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
            if (lock := _lock(path)) is not None:
                return cls(path, lock)
            # Between the two lines another starting server removed it as a leftover.

    def attach(self, file: Path) -> None:
        """Have a file outside the folder removed with it."""
        (self.path / f"{LINK_PREFIX}{file.name}").symlink_to(file)

    def remove(self) -> None:
        _remove(self.path)
        os.close(self._lock)


def _remove(path: Path) -> None:
    for link in path.glob(LINK_PREFIX + "*"):
        with contextlib.suppress(OSError):
            os.unlink(os.readlink(link))
    shutil.rmtree(path, ignore_errors=True)


def _remove_if_stale(path: Path) -> None:
    with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile
        if path.lstat().st_uid == os.geteuid() and (lock := _lock(path)) is not None:
            _remove(path)
            os.close(lock)


def _lock(path: Path) -> int | None:
    """Open and lock the folder; None if another process holds the lock or has removed the folder."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(handle).st_ino:
            return handle
    except OSError:
        pass
    os.close(handle)
    return None
