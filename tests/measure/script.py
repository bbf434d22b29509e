"""Run a measurement of this folder from the command line: `python tests/measure/NAME.py --help`.

Measurements have `add_arguments(parser)` and `run(args)`, as the commands of `outrider` have.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from outrider.server.bench import record
from outrider.server.cli.main import WideHelp
from outrider.server.errors import UserError


def main(module: Any, words: list[str] | None = None) -> int:
    """Returns the exit code; a user's error is printed in one line."""
    parser = argparse.ArgumentParser(description=module.__doc__, formatter_class=WideHelp)
    module.add_arguments(parser)
    before, record.PROGRAM = record.PROGRAM, f"python tests/measure/{Path(module.__file__).name}"
    try:
        return int(module.run(parser.parse_args(words)))
    except UserError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    finally:
        record.PROGRAM = before
