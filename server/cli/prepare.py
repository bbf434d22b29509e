"""Do once what a first start would do: prepare the model, compile the CPU kernels. Prints the model's folder.

With --unpack it is an ordinary Hugging Face folder with the weights in bfloat16, for other programs.
"""

from __future__ import annotations

import argparse

from ..machine import hardware


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """OUTRIDER_CACHE or XDG_CACHE_HOME choose the place."""
    parser.add_argument("--model", metavar="FILE.gguf", help="(default: the embedded model)")
    parser.add_argument("--unpack", action="store_true", help="expand the weights to bfloat16")


def run(args: argparse.Namespace) -> int:
    from ..model import target

    folder = target.plain_folder(args.model) if args.unpack else target.find(args.model).path
    if not hardware.has_gpu():
        hardware.instruction_set()  # compiles them
    print(folder)
    return 0
