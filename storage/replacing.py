"""Atomic, durable file replacement: after a kill or a power failure there is the old file or the new one, whole."""

import contextlib
import glob
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

MODE = 0o644


@contextlib.contextmanager
def replacing(path: Path, mode: int = MODE, *, alone: bool = False) -> Iterator[Path]:
    """Yield an empty file to write; it replaces `path` when the block ends.

    The content is on the disk before the replacement, and the replacement before this returns. If the block raises,
    `path` keeps its content and the new file is removed.

    mode: permissions of the new file. alone: no other process writes `path`, so the files of killed writers are removed
    first. Raises OSError.
    """
    prefix = f".{path.name}."
    if alone:
        for leftover in path.parent.glob(f"{glob.escape(prefix)}*"):
            leftover.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(prefix=prefix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(mode)
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def replace(texts: Mapping[Path, str], mode: int = MODE) -> None:
    """Replace the files in this order once all of them are on the disk: if it is full, none changes.

    Raises OSError.
    """
    with contextlib.ExitStack() as stack:
        for path, text in reversed(list(texts.items())):  # the file entered last is replaced first
            temporary = stack.enter_context(replacing(path, mode))
            temporary.write_text(text, encoding="utf-8")
            sync(temporary)


def sync(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush a folder and all that is in it to the disk. Raises OSError."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            sync(path)
    for path in (*(inner for inner in folder.rglob("*") if inner.is_dir() and not inner.is_symlink()), folder):
        sync(path)
