"""Returns memory that is free in this process to the machine.

The logits of a step are tens of MB in sizes that change with its requests. glibc's allocator keeps free memory between
blocks in use, so the memory of a server under mixed load creeps up without a leak.
"""

import ctypes
import threading
import time

SECONDS = 300.0
"""Between two calls: returning some hundred MB and getting them again takes 0.1 to 0.2 s each."""


def give_back_free_memory(every: float = SECONDS) -> None:
    """Return free memory every `every` seconds, in a separate thread, if the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return

    def run() -> None:
        while True:
            time.sleep(every)
            trim(0)

    threading.Thread(target=run, name="give-back-free-memory", daemon=True).start()
