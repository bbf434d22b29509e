"""Do once what a first start would do: unpack and check the embedded model, compile the CPU kernels.

Prints the model's folder.
"""

from __future__ import annotations

import argparse

from outrider.server.engine import bundled_model, hardware


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments; OUTRIDER_CACHE or XDG_CACHE_HOME choose the place."""


def run(args: argparse.Namespace) -> int:
    folder = bundled_model.prepare()
    if not hardware.has_gpu():
        hardware.has_kernels()  # compiles them
    print(folder)
    return 0
