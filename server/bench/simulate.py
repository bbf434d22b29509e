"""Compare planners on a simulated server, from step costs and acceptance, without the hardware.

Costs come from a profile that `outrider tune` measured (--profile), or from a few numbers in milliseconds (--cost):

  T = base + request x requests + context x cached tokens + token x max(0, verified tokens - knee)
  and draft + draft_request x requests on top where a step drafts

Up to `knee` tokens a step is bound by reading the weights and more tokens are free; that is where speculation pays.

Arrivals: "closed" is a closed loop with --concurrency requests in flight. With "poisson" and "bursty" at most
--concurrency requests run, and --load says how many arrive: 1 is what a server without speculation can just answer.
"bursty" brings four times that for a fifth of the time, in bursts of a fifth of an answer's time.

With --recorded planners run on recorded positions of real answers instead, and with the step times of every shipped
profile, or of --profile. The table then shows throughput over no speculation, and its range over resampled answers;
`deciding` is the planner's real time on this machine. --record makes a recording.

The table, one row per concurrency and planner:
  tok/s      tokens per second of all requests  user, p50, p1  tokens per second of one request after its first token
  wait, p99  TTFT in seconds                    tau            accepted length: tokens out per request and step
  verify     tokens in per request and step     waste          share of verified drafts that were rejected
  plain      share of steps without drafting    met, goodput   service level attained; tok/s of requests that got it
  us         microseconds of processor time that the planner takes per step, on this machine
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.scheduler.planners import registry

from .. import pictures
from ..errors import UserError
from . import harness, record

if TYPE_CHECKING:
    from outrider.scheduler.cost.model import StepCost
    from outrider.scheduler.planners.base import Planner
    from outrider.scheduler.simulation.simulator import Result
    from outrider.scheduler.simulation.workload import Acceptance, Workload

EXAMPLES = """\
examples:
  outrider simulate                                       a GPU-like machine, 1 to 4096 users
  outrider simulate --profile NAME --acceptance accept.json --plot simulated.png
                                                          this engine, a drafter as `outrider bench load` measured it
  outrider simulate --cost base=8,token=0.02,knee=256,draft=0.6 --acceptance 0.9,0.85,0.8,0.8,0.75
  outrider simulate --record mine.npz --prompts prompts.jsonl
  outrider simulate --recorded mine.npz --concurrency 1,8,32
  outrider simulate --arrivals bursty --load 1.1 --level 30 --level-share 0.33
"""
PLANNERS = ("off", *reversed(registry.names()))
MOST_REQUESTS = 100_000
COLUMNS = {
    "tok/s": ("throughput", "{:.0f}"),
    "user": ("speed_mean", "{:.1f}"),
    "p50": ("speed_p50", "{:.1f}"),
    "p1": ("speed_p1", "{:.1f}"),
    "wait": ("wait_mean", "{:.2f}"),
    "p99": ("wait_p99", "{:.2f}"),
    "tau": ("accepted_length", "{:.2f}"),
    "verify": ("verified_per_request", "{:.2f}"),
    "waste": ("wasted", "{:.0%}"),
    "plain": ("not_drafted", "{:.0%}"),
    "met": ("attainment", "{:.0%}"),
    "goodput": ("goodput", "{:.0f}"),
    "us": ("planner_us", "{:.0f}"),
}


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
    add(
        "--overconfidence", type=float, default=1.0, metavar="X", help="that of the drafter; 1: calibrated (default: 1)"
    )
    add("--planners", default=",".join(PLANNERS), metavar="LIST", help="threshold=P sets its P (default: %(default)s)")
    add("--concurrency", default="1,8,64,512,4096", metavar="LIST", help="requests (default: %(default)s)")
    arrivals = ("closed", "poisson", "bursty")
    add("--arrivals", choices=arrivals, default="closed", help="as above (default: closed)")
    add("--load", type=float, default=0.9, metavar="X", help="share of what can be answered (default: 0.9)")
    add("--prompt", type=int, default=256, metavar="N", help="tokens of a prompt, mean (default: 256)")
    add("--output", type=int, default=256, metavar="N", help="tokens of an answer, mean (default: 256)")
    add("--prefill", type=float, metavar="MS", help="per prompt token (default: as a verified token)")
    add("--level", type=float, default=0.0, metavar="TOK/S", help="service level (default: none)")
    add("--level-share", type=float, default=1 / 3, metavar="X", help="requests with it (default: a third)")
    add("--slowdown", type=float, default=1.0, metavar="X", help="steps really take X times the costs (default: 1)")
    add("--noise", type=float, default=0.02, metavar="X", help="relative noise of step times (default: 0.02)")
    add(
        "--steps",
        type=int,
        metavar="N",
        help="simulated time, in steps without drafts (default: 1000, or 4000 where arrivals vary)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of arrivals and outcomes (default: 0)")
    recordings = parser.add_mutually_exclusive_group()
    recordings.add_argument("--recorded", type=Path, metavar="FILE", help="plan these positions of real answers")
    recordings.add_argument("--record", type=Path, metavar="FILE", help="record answers of a target to --prompts")
    add("--resamples", type=int, default=5, metavar="N", help="resamplings of --recorded (default: 5)")
    add("--target", metavar="PATH_OR_HUB_NAME", help="model that --record asks (default: the embedded model)")
    add("--prompts", nargs="+", type=Path, metavar="FILE", help="prompts that --record asks")
    add("--count", type=int, default=32, metavar="N", help="prompts of each file (default: 32)")
    harness.add_output_flags(parser, json="the table", plot="throughput, speed and verified tokens")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One machine and one drafter. cost: a fresh model at each call, since planners change theirs as they learn."""

    cost: Callable[[], StepCost]
    acceptance: Acceptance


def run(args: argparse.Namespace) -> int:
    harness.check_outputs(args)
    try:
        if args.record or args.recorded:
            from . import replay

            if args.record:
                return replay.record(args)
            args.steps = 600 if args.steps is None else args.steps
            rows = replay.run(args)
        else:
            rows = _simulate(args)
    except ValueError as error:
        raise UserError(str(error)) from error
    clean = [{k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in rows]
    record.write(args.json, "simulate", clean)
    if args.plot and not args.recorded:
        from outrider.scheduler.simulation.plot import plot_simulation

        with pictures.figure(args.plot) as figure:
            plot_simulation(rows, figure)
    return 0


def _simulate(args: argparse.Namespace) -> list[dict[str, float | str]]:
    from tqdm import tqdm

    from outrider.scheduler.simulation.simulator import Simulation

    sizes = harness.positive_integers("--concurrency", args.concurrency)
    if max(sizes) > MOST_REQUESTS:
        raise UserError(f"--concurrency is from 1 to {MOST_REQUESTS}, not {args.concurrency!r}")
    names = [name for name in args.planners.split(",") if name]
    harness.check_positive(args, "prompt", "output")
    if args.steps is None:
        args.steps = 1000 if args.arrivals == "closed" else 4000
    if args.steps < 10 or args.slowdown <= 0 or args.noise < 0 or args.load <= 0:
        raise UserError("--steps is at least 10, --slowdown and --load above 0, --noise 0 or more")
    scenario = _scenario(args, max(sizes))
    for name in names:
        _planner(name, scenario)
    rows: list[dict[str, float | str]] = []
    print(f"{'requests':>8} {'planner':<14}" + "".join(f"{name:>8}" for name in COLUMNS))
    with tqdm(total=len(sizes) * len(names), bar_format="{l_bar}{bar}| {elapsed}<{remaining}") as bar:
        for size in sizes:
            workload, seconds = _workload(args, scenario.cost(), size)
            for name in names:
                real = _slowed(scenario.cost(), args.slowdown)
                planner = _planner(name, scenario)
                simulation = Simulation(planner, real, scenario.acceptance, workload, seed=args.seed, noise=args.noise)
                result = simulation.run(seconds, partial(_advance, bar, seconds))
                rows.append({"planner": name, "requests": float(size), **result.summary()})
                tqdm.write(_line(size, name, result))
    return rows


def _advance(bar: Any, whole: float, step: float) -> None:
    bar.update(min(step / whole, bar.total - bar.n))


def _line(size: int, name: str, result: Result) -> str:
    summary = result.summary()
    cells = ["-" if math.isnan(summary[key]) else form.format(summary[key]) for key, form in COLUMNS.values()]
    return f"{size:>8} {name:<14}" + "".join(f"{cell:>8}" for cell in cells)


def _scenario(args: argparse.Namespace, largest: int) -> Scenario:
    from outrider.profiles import store
    from outrider.scheduler.cost.synthetic import SyntheticCost
    from outrider.scheduler.simulation.workload import Acceptance

    acceptance = Acceptance(_conditional(args.acceptance), overconfidence=args.overconfidence)
    if args.profile:
        from ..settings import profile_lookup

        return Scenario(store.locate(args.profile, profile_lookup.roots()).cost, acceptance)
    numbers = {}
    for part in filter(None, args.cost.split(",")):
        name, _, value = part.partition("=")
        if name not in SyntheticCost.__dataclass_fields__:
            raise UserError(f"--cost knows {', '.join(SyntheticCost.__dataclass_fields__)}, not {name!r}")
        try:
            numbers[name] = float(value)
        except ValueError:
            raise UserError(f"--cost {name} is a number of milliseconds (knee: of tokens), not {value!r}") from None
    synthetic = SyntheticCost(**numbers)
    return Scenario(lambda: synthetic.model(acceptance.gamma, largest), acceptance)


def _conditional(wanted: str) -> list[float]:
    """Acceptance by position from a list, or from the counts of a record of `outrider bench`, summed up."""
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


def _planner(name: str, scenario: Scenario) -> Planner:
    from outrider.scheduler.planners.baselines import StaticGamma

    kind, _, value = name.partition("=")
    if kind == "off":
        return StaticGamma(0)
    if kind not in PLANNERS:
        raise UserError(f"--planners knows {', '.join(PLANNERS)}, not {name!r}")
    entry = registry.find(kind)
    threshold = _survival(kind, value) if value and "threshold" in entry.takes else 0.3
    cost = scenario.cost() if entry.needs_profile else None
    return registry.make(kind, gamma=scenario.acceptance.gamma, threshold=threshold, cost=cost)


def _survival(kind: str, text: str) -> float:
    try:
        survival = float(text)
    except ValueError:
        survival = math.nan
    if not 0 <= survival <= 1:
        raise UserError(f"--planners {kind}=P takes a survival in 0..1, not {text!r}")
    return survival


def _slowed(cost: StepCost, factor: float) -> StepCost:
    """The same costs `factor` times as long."""
    from dataclasses import replace

    from outrider.scheduler.cost.model import StepCost

    return StepCost(replace(p, seconds=tuple(s * factor for s in p.seconds)) for p in cost.points)


def _workload(args: argparse.Namespace, cost: StepCost, size: int) -> tuple[Workload, float]:
    """The workload at one concurrency, and how many seconds of it to simulate."""
    from outrider.scheduler.simulation.workload import Workload

    largest = max((p for p in cost.points if p.tokens), key=lambda p: (p.requests, p.tokens))
    first, last = cost.seconds(largest.requests, np.array([largest.requests, largest.tokens]), largest.context)
    prefill = max(0.0, (last - first) / max(1, largest.tokens - largest.requests))
    if args.prefill is not None:
        prefill = args.prefill / 1e3
    context = size * (args.prompt + args.output / 2)
    step = float(cost.seconds(size, np.array([size]), context)[0])
    answered = size / (args.output * step + size * args.prompt * prefill)  # requests per second, without speculation
    return Workload(
        arrivals=args.arrivals,
        concurrency=size,
        rate=args.load * answered,
        burst_seconds=args.output * step / 5,
        max_running=size,
        prompt=args.prompt,
        output=args.output,
        prefill_seconds=prefill,
        level=args.level,
        level_share=args.level_share if args.level else 0.0,
    ), args.steps * step
