"""Files that are replaced at once: whoever reads, or is killed, meanwhile finds an old or a new one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def replace(texts: Mapping[Path, str]) -> None:
    """Write the files, in this order, and only when all of them are on the disk: where it is full, none is changed.

    Their folders are left without temporary files whatever happens. Raises OSError.
    """
    written: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            written[path] = Path(temporary)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            written[path].chmod(0o644)
        for path, complete in written.items():
            complete.replace(path)
    finally:
        for leftover in written.values():
            leftover.unlink(missing_ok=True)
