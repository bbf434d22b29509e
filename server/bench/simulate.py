"""Compare planners on a simulated server, without the hardware: throughput over no speculation.

Each user gets one answer after another. The time of a decode step comes from a profile (--profile, measured by
`outrider tune`) or from a few numbers in milliseconds (--cost):

  T = base + request x requests + context x cached tokens + token x max(0, verified tokens - knee)
  plus draft + draft_request x requests if the step drafts

Up to `knee` tokens, reading the weights bounds a step, and more tokens are free; there speculation pays. The planner's
own time on this machine is added.

Answers are made up from acceptance by position (--acceptance). --recorded plans the drafts at every token of real
answers (tests/measure/recording.py), with the named machine or else every shipped profile.

The table shows, for each machine and number of requests, the median over resampled answers and their range.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from outrider.drafters import registry as drafters
from outrider.drafters.lookup_first import LOOKUP_THRESHOLD
from outrider.scheduler.planner import Asynchronous

from .. import pictures
from ..errors import UserError
from . import harness, record
from .replay import Drafting, Positions, Replay
from .simulated import PLANNERS, WARM_UP, Machine, machines_of, make_planner

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLES = """\
examples:
  outrider simulate                                       a GPU-like machine, 1 to 512 users
  outrider simulate --profile NAME --acceptance accept.json
                                                          this engine, a drafter as `outrider bench load` measured it
  outrider simulate --cost base=8,token=0.02,knee=256,draft=0.6 --acceptance 0.9,0.85,0.8,0.8,0.75
  outrider simulate --recorded mine.npz --concurrency 1,8,32
"""
MOST_REQUESTS = 100_000


MOVED = (
    dict.fromkeys(("--arrivals", "--load", "--level", "--level-share"), "outrider bench load")
    | dict.fromkeys(("--slowdown", "--prefill"), "--cost or --profile")
    | dict.fromkeys(("--noise", "--overconfidence"), "--recorded, which has the confidences of a real drafter")
    | dict.fromkeys(
        ("--record", "--target", "--prompts", "--count"), "`python tests/measure/recording.py` in a checkout"
    )
    | {"--seed": "--resamples", "--plot": "--json", "--ablate": "`python tests/measure/ablation.py` in a checkout"}
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, add = EXAMPLES, parser.add_argument
    costs = parser.add_mutually_exclusive_group()
    costs.add_argument("--profile", metavar="NAME_OR_FOLDER", help="step costs measured by `outrider tune`")
    costs.add_argument(
        "--cost",
        default="",
        metavar="LIST",
        help="milliseconds as above (default: base=20,token=0.1,knee=64,request=0.02,draft=2,draft_request=0.01)",
    )
    add(
        "--acceptance",
        default="0.8,0.78,0.76,0.75,0.74,0.73,0.72",
        metavar="LIST_OR_FILE",
        help="acceptance by position, given those before; or a file of `outrider bench load --json` "
        "(default: %(default)s)",
    )
    add("--planners", default=",".join(PLANNERS), metavar="LIST", help="threshold=P sets its P (default: %(default)s)")
    add("--concurrency", default="1,8,64,512", metavar="LIST", help="requests (default: %(default)s)")
    add("--prompt", type=int, default=256, metavar="N", help="tokens of a prompt (default: 256)")
    add("--output", type=int, default=256, metavar="N", help="tokens of an answer (default: 256)")
    add("--steps", type=int, default=600, metavar="N", help="steps that count (default: %(default)s)")
    add("--resamples", type=int, default=5, metavar="N", help="resamplings of the answers (default: %(default)s)")
    add("--recorded", type=Path, metavar="FILE", help="plan these positions of real answers")
    add("--picture", type=Path, metavar="FILE", help="draw one decision for each number of requests; needs matplotlib")
    harness.add_output_flags(parser, json="every ratio")


def run(args: argparse.Namespace) -> int:
    harness.check_positive(args, "prompt", "output", "steps", "resamples")
    harness.check_outputs(args)
    if args.picture:
        pictures.require("--picture")
    try:
        _simulate(args)
    except ValueError as error:
        raise UserError(str(error)) from error
    return 0


def _simulate(args: argparse.Namespace) -> None:
    """Print throughput over no speculation: the median and range over resampled answers."""
    sizes = harness.positive_integers("--concurrency", args.concurrency)
    if max(sizes) > MOST_REQUESTS:
        raise UserError(f"--concurrency is from 1 to {MOST_REQUESTS}, not {args.concurrency!r}")
    names = [name for name in args.planners.split(",") if name and name != "off"]
    if args.recorded:
        positions = Positions.load(args.recorded)
    else:
        positions = Positions.made_up(_conditional(args.acceptance), args.prompt, args.output)
    gamma = positions.lookup.shape[1]
    machines = list(machines_of(args, gamma, max(sizes)))
    for name in names:
        make_planner(name, gamma, machines[0].cost())
    rows = []
    print(f"{'machine':<44} {'requests':>8} " + "".join(f"{name:>26}" for name in names))
    run_length = drafters.find("dspark").expected_run_length
    for machine in machines:
        drafting = Drafting.of(positions, machine.calibration, LOOKUP_THRESHOLD, run_length)
        for size in sizes:
            measure = partial(_throughput, machine, drafting, size, args.steps)
            plain = [measure("off", seed) for seed in range(args.resamples)]
            cells = []
            for name in names:
                found = [measure(name, seed) / own for seed, own in enumerate(plain)]
                rows.append({"machine": machine.name, "requests": size, "planner": name, "ratios": found})
                cells.append(f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})")
            print(f"{machine.name:<44} {size:>8} " + "".join(f"{cell:>26}" for cell in cells), flush=True)
    record.write(args.json, "simulate", rows)
    if args.picture:
        drafting = Drafting.of(positions, machines[0].calibration, LOOKUP_THRESHOLD, run_length)
        with pictures.figure(args.picture) as figure:
            _plot_decisions(machines[0], drafting, sizes, args.steps, figure)


def _plot_decisions(machine: Machine, drafting: Drafting, sizes: Sequence[int], steps: int, figure: Figure) -> None:
    """Draw the last decision for each number of requests: each plan's throughput curve and the chosen point."""
    figure.set_size_inches(4.5 * len(sizes), 3.5)
    for axis, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        planner = Asynchronous(machine.cost(), drafting.positions.lookup.shape[1])
        Replay(planner, machine.cost(), drafting, size).run(steps, WARM_UP)
        assert planner.considered is not None
        plans, best = planner.considered
        for plan in plans:
            name = f"drafts of {plan.depth or 'all'} tokens" if plan.drafts else "lookups"
            style = {"label": name} if plan is not plans[0] else {"label": "rest", "marker": "o"}
            axis.plot(plan.curve.tokens, plan.curve.throughput, **style)
        axis.plot(best.verified, best.throughput, "k*", markersize=12, label="chosen")
        axis.set_title(f"{machine.name}, {size} requests", fontsize=8)
        axis.set_xlabel("draft tokens verified")
        axis.legend(fontsize=8)
    figure.axes[0].set_ylabel("tokens per second expected")


def _conditional(wanted: str) -> list[float]:
    """Acceptance by position, from a list or from the summed counts of a record of `outrider bench`."""
    path = Path(wanted)
    if not path.is_file():
        try:
            return [float(part) for part in wanted.split(",")]
        except ValueError:
            raise UserError(f"--acceptance is a list like 0.8,0.7 or a file that exists, not {wanted!r}") from None
    try:
        counts = list(record.acceptance_counts(json.loads(path.read_text())))
        tried, kept = (np.sum([c[key] for c in counts], axis=0) for key in ("tried", "kept"))
        if not counts:
            raise ValueError("it counts no drafts")
    except (ValueError, TypeError) as error:
        raise UserError(f"--acceptance {path} is not from `outrider bench load --json`: {error}") from error
    seen = int(np.count_nonzero(tried))
    if not seen or not np.all(tried[:seen] > 0):
        raise UserError(f"--acceptance {path} counts no tokens at its first positions")
    return (kept[:seen] / tried[:seen]).tolist()


def _throughput(machine: Machine, drafting: Drafting, size: int, steps: int, name: str, seed: int) -> float:
    cost = machine.cost()
    planner = make_planner(name, drafting.positions.lookup.shape[1], machine.cost())
    return Replay(planner, cost, drafting, size, seed=seed).run(steps, WARM_UP)
