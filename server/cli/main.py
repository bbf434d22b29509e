"""The `outrider` command. Each command is a module with `add_arguments(parser)` and `run(args)`, or with `COMMANDS`.

Imports only the requested command's module, so that `--help` answers at once.
"""

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from ..errors import UserError

DESCRIPTION = """\
Outrider serves large language models faster, without changing what they say.

A drafter proposes several tokens, the model verifies them in one step, and what the model would not
have said is thrown away. It runs inside SGLang and answers OpenAI-compatible requests.
"""
EXAMPLES = """\
examples:
  outrider serve                                  serve the small embedded model on 127.0.0.1:30000
  outrider serve --model ./Qwen3-4B --port 8000   serve a model folder
  outrider serve --model qwen3-4b-q8_0.gguf       serve a GGUF file, its weights in their own bits
  outrider serve --drafter off                    the same server without speculation, to compare
  outrider serve -- --tp-size 2                   anything after -- goes to SGLang as it is
  outrider train dspark --target ./Qwen3-4B --self-prompts 5000 --out runs/dspark
  outrider tune                                   measure this machine, for better planning
  outrider bench micro steps                      what an engine step costs here
  outrider prepare                                only prepare the embedded model, then exit

When the server is ready it prints a curl command to try. Ctrl-C drains and stops it.
"""
# name: (module, one line of help)
COMMANDS = {
    "serve": ("outrider.server.cli.serve", "start a server"),
    "prepare": ("outrider.server.cli.prepare", "prepare the embedded model and compile the CPU kernels"),
    "drafters": ("outrider.server.cli.drafters", "list a model's drafters: here, fitting, how fast"),
    "tune": ("outrider.server.tune.cli", "measure step costs and calibrate the drafter"),
    "bench": ("outrider.server.bench.cli", "measure throughput, accepted length and steps"),
    "simulate": ("outrider.server.bench.simulate", "compare planners on a simulated server"),
    "train": ("outrider.server.cli.train", "train a drafter for a model"),
    "export": ("outrider.server.cli.export", "write a drafter in another storage, or a converted model"),
    "learn": ("outrider.server.cli.learn", "show, delete or take out what a server has learned"),
    "key": ("outrider.server.cli.key", "make an API key for `outrider serve --api-keys`"),
    "doctor": ("outrider.server.cli.doctor", "check this installation and say what to do"),
    "version": ("outrider.server.cli.version", "print the versions of Outrider and its packages"),
}
MOVED = {"gpu-check": "`make test-gpu` in a checkout (docs/gpu.md)"}


class WideHelp(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions, and puts a command's help on the line of its name, even a long one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)
        self._action_max_length = 14  # argparse ignores the indentation of commands


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the return value is the exit code."""
    # Numpy's products here are small, and its threads would compete with the engine's. Numpy reads it on import.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="outrider", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=WideHelp
    )
    parser.add_argument("--version", action="store_true", help="print Outrider's version")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    try:
        if argv and argv[0] in MOVED:
            raise UserError(f"`outrider {argv[0]}` is gone: use {MOVED[argv[0]]}")
        add_commands(subparsers, COMMANDS, argv)
        args = parser.parse_args(argv)
        if args.version:
            print(f"outrider {version('outrider')}")
            return 0
        if args.command is None:
            parser.print_help()
            return 0
        with contextlib.nullcontext() if args.command == "serve" else _stopped_as_by_ctrl_c():
            return int(args.run(args) or 0)
    except UserError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


@contextlib.contextmanager
def _stopped_as_by_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM as SIGINT, so that a command ends its servers and keeps its measurements."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def add_commands(subparsers: Any, commands: Mapping[str, tuple[str, str]], argv: Sequence[str]) -> None:
    """Add the commands of a table, and the arguments of the one that `argv` chooses.

    Raises UserError for a command or flag in its module's `MOVED` table, with the replacement.
    """
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, (module_name, summary) in commands.items():
        if name != chosen:
            subparsers.add_parser(name, help=summary)
            continue
        module, rest = importlib.import_module(module_name), argv[argv.index(name) + 1 :]
        parser = subparsers.add_parser(name, help=summary, description=module.__doc__, formatter_class=WideHelp)
        moved, nests = getattr(module, "MOVED", {}), hasattr(module, "COMMANDS")
        for word in (each.partition("=")[0] for each in (rest[:1] if nests else rest)):
            if word in moved:
                gone = f"{parser.prog} {word}" if nests else word
                raise UserError(f"`{gone}` is gone: use {moved[word]}")
        if nests:
            nested = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)
            add_commands(nested, module.COMMANDS, rest)
        else:
            module.add_arguments(parser)
            parser.set_defaults(run=module.run)


if __name__ == "__main__":
    sys.exit(main())
