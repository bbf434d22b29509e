"""Prepare the model and compile the CPU kernels, as a first start would. Prints the model's path.

With --unpack that is an ordinary Hugging Face folder with the weights in bfloat16, for other programs. The cache
folder holds the results: OUTRIDER_CACHE, else XDG_CACHE_HOME/outrider, else ~/.cache/outrider.

examples:
  outrider prepare
  outrider prepare --model qwen3-4b-q8_0.gguf --unpack
"""

import argparse

from ..machine import hardware


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="FILE.gguf", help="the model to prepare (default: the embedded model)")
    parser.add_argument("--unpack", action="store_true", help="expand the weights to bfloat16")


def run(args: argparse.Namespace) -> int:
    from ..model import target

    folder = target.plain_folder(args.model) if args.unpack else target.find(args.model).path
    if not hardware.has_gpu():
        hardware.instruction_set()  # compiles them
    print(folder)
    return 0
