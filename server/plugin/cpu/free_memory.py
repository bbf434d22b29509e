"""Memory that is free in this process goes back to the machine.

The logits of a step are tens of MB in sizes that change with its requests. glibc's allocator keeps what lies free
between blocks that stay, so that the memory of a server under mixed load creeps up although nothing leaks.
"""

import ctypes
import threading
import time

SECONDS = 300.0
"""Giving back some hundred MB, and getting them again, takes a tenth of a second or two each."""


def give_back_free_memory(every: float = SECONDS) -> None:
    """Do so from now on, `every` so many seconds, beside what the process does; nothing where the C library cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return

    def run() -> None:
        while True:
            time.sleep(every)
            trim(0)

    threading.Thread(target=run, name="give-back-free-memory", daemon=True).start()
