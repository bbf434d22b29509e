"""Microseconds that a GPU's host takes for a decode step, without a GPU: from the batch to the step's result.

Counted are the worker, the planner, SGLang's sampling batch and the preparation of launches (`steps_on_meta.py`); not
the driver, and not SGLang's forward. With --against, a checkout of another version takes turns, round by round.

examples:
  git worktree add ../before HEAD~1 && python tests/measure/host_times.py --against ../before
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import script

from outrider.server.bench import harness, record
from outrider.server.errors import UserError

ROOT = Path(__file__).parents[2]
STEPS = Path(__file__).with_name("steps_on_meta.py")
FOLDERS = ".src", "tests/support", "tests/drafters", "tests/kernels", "tests/server/plugin"
"""Folders of a checkout that are imported from."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=1000, metavar="N", help="steps of each case and round (default: %(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="processes of each checkout (default: %(default)s)")
    add("--against", metavar="FOLDER", help="a checkout of another version, with the same Python environment")
    harness.add_output_flags(parser, json="every round's median")


def run(args: argparse.Namespace) -> int:
    harness.check_positive(args, "steps", "rounds")
    harness.check_outputs(args)
    trees = {"here": ROOT} | ({"there": Path(args.against).resolve()} if args.against else {})
    if not all((tree / ".src").is_dir() for tree in trees.values()):
        raise UserError(f"{args.against} is no checkout of this project")
    results: dict[str, dict[str, list[float]]] = {}
    for _, _, name in harness.alternate_arms(args.rounds, ["a step"], list(trees)):
        for case, times in timed(trees[name], args.steps).items():
            results.setdefault(case, {}).setdefault(name, []).append(statistics.median(times))
    print(f"{'step, µs':>24} " + " ".join(f"{name:>8}" for name in trees) + (" here/there" if args.against else ""))
    for case, found in results.items():
        medians = [statistics.median(found[name]) for name in trees]
        ratio = f" {medians[0] / medians[-1]:10.2f}" if args.against else ""
        print(f"{case:>24} " + " ".join(f"{median:8.0f}" for median in medians) + ratio)
    record.write(args.json, "host times", results, steps=args.steps)
    return 0


def timed(tree: Path, steps: int) -> dict[str, list[float]]:
    """Return the microseconds of each step of a checkout, by case."""
    path = os.pathsep.join(str(tree / folder) for folder in FOLDERS)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", STEPS, str(steps)],
        env=os.environ | {"PYTHONPATH": path}, cwd=tree, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if run.returncode:
        raise UserError(f"the steps of {tree} failed: {run.stderr.strip().splitlines()[-1]}")
    found: dict[str, list[float]] = json.loads(run.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(script.main(sys.modules[__name__]))
