"""Durable files that grow by lines."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .replacing import sync


@contextmanager
def appending(path: Path, every: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that appends a line to a file, made if need be.

    A line survives a kill of this process when the function returns. It survives a power failure once `every` lines
    have come, or the block has ended, however it ends. Raises OSError.
    """
    with path.open("a", encoding="utf-8") as file:
        sync(path.parent)
        count = 0

        def append(line: str) -> None:
            nonlocal count
            file.write(line + "\n")
            file.flush()
            count += 1
            if count % every == 0:
                os.fsync(file.fileno())

        try:
            yield append
        finally:
            file.flush()
            os.fsync(file.fileno())
