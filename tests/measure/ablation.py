"""Simulates the planner without each of its mechanisms, and the other planners, relative to the whole planner, on
recorded answers and in made-up situations.

Numbers are goodput: tokens per second, where a request with a service level counts only while it keeps the level.

examples:
  python tests/measure/recording.py mine.npz --prompts prompts.jsonl
  python tests/measure/ablation.py --recorded mine.npz --concurrency 1,8,32,128
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import script

from outrider.drafters import registry as drafters
from outrider.drafters.lookup_first import LOOKUP_THRESHOLD
from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.cost.step_times import Point
from outrider.scheduler.planner import Asynchronous, Plan
from outrider.server.bench import harness, record
from outrider.server.bench.replay import Drafting, Positions, Replay
from outrider.server.bench.simulated import WARM_UP, Machine, machines_of, make_planner

PLANNERS = ("off", "verify-all", "threshold", "synchronous")


def change(path: str, value: Any) -> Callable[[Asynchronous], None]:
    """Set an attribute of a planner; the path "a.b" names attribute b of its attribute a."""
    *owners, name = path.split(".")

    def apply(planner: Asynchronous) -> None:
        owner = reduce(getattr, owners, planner)
        getattr(owner, name)  # raises if there is no such attribute
        setattr(owner, name, value)

    return apply


def _keep_plans(choose: Callable[[list[Plan]], list[Plan]]) -> Callable[[Asynchronous], None]:
    """Choose among plans. The first plan is the rest, the last one the model's drafts, all other plans are lookups
    alone."""

    def apply(planner: Asynchronous) -> None:
        whole = planner._plans
        planner._plans = lambda *step: choose(whole(*step))

    return apply


def _no_probes(planner: Asynchronous) -> None:
    for name in ("due", "save"):
        change(f"probing.{name}", lambda *_: False)(planner)


def _model_drafts_for_all(planner: Asynchronous) -> None:
    """Expect that prompt lookup never saves a draft of the model."""
    write = planner.history.write
    certain = lambda rows, generations, survival, _, groups: write(rows, generations, survival, 1.0, groups)  # noqa: E731
    change("history.write", certain)(planner)


def _ignore(*_: Any, **__: Any) -> None:
    pass


WITHOUT: dict[str, Callable[[Asynchronous], None]] = {
    "several past drafts": change("smoothing", 1),
    "held plans": change("held", 1),
    "choice of depth": change("block", None),
    "survival beyond shallow drafts": change("history.extrapolated", lambda survival, depth, block: survival),
    "required return below 1": change("required_return", 1.0),
    "rests": _keep_plans(lambda plans: [plans[-1], *plans[1:]] if len(plans) > 2 else plans),
    "lookups alone": _keep_plans(lambda plans: [plans[0], plans[-1]]),
    "chance that the model has to draft": _model_drafts_for_all,
    "probes": _no_probes,
    "correction": change("correction.observe", _ignore),
    "its fading at probes": change("correction.fade", _ignore),
    "drift": change("cost.observe", _ignore),
    "time of deciding": change("cost.observe_deciding", _ignore),
}
"""Mechanisms, each with a change that switches it off before the first step."""


@dataclass(frozen=True, slots=True)
class Situation:
    """A change of recorded answers and of a machine.

    positions: changes the answers. earlier: changes the answers of the first steps, which do not count; None: as
    positions. measured, real: change the points of the profile, and the real step times. calibrated: whether
    confidences are calibrated. level: service level of every second request, relative to tokens per second without
    drafts; 0: none.
    """

    positions: Callable[[Positions], Positions] = lambda recorded: recorded
    earlier: Callable[[Positions], Positions] | None = None
    measured: Callable[[Point], Point] = lambda point: point
    real: Callable[[Point], Point] = lambda point: point
    calibrated: bool = True
    level: float = 0.0


def _failing(recorded: Positions, share: float = 1.0) -> Positions:
    """Reject all drafts. share: of the recorded confidences."""
    kept = np.zeros_like(recorded.model_kept)
    confidence = (recorded.model * share).astype(np.float16)
    return replace(recorded, model=confidence, lookup=recorded.lookup * share, model_kept=kept, lookup_kept=kept)


def _hopeless(recorded: Positions) -> Positions:
    """Reject all drafts; every confidence is 0.4, and lookup has no match."""
    sure = np.full_like(recorded.model, 0.4)
    return replace(_failing(recorded), model=sure, lookup_lens=np.zeros_like(recorded.lookup_lens))


def _half_failing(recorded: Positions) -> Positions:
    """Reject all drafts in every second answer."""
    failing = np.repeat(np.arange(len(recorded.prompts)) % 2 == 1, np.diff(recorded.starts))
    worse = _failing(recorded, 0.3)
    return replace(
        recorded,
        model=np.where(failing[:, None], worse.model, recorded.model),
        lookup=np.where(failing[:, None], worse.lookup, recorded.lookup),
        model_kept=np.where(failing, 0, recorded.model_kept),
        lookup_kept=np.where(failing, 0, recorded.lookup_kept),
    )


def _short(recorded: Positions, length: int = 24) -> Positions:
    """Answers of at most `length` tokens, cut from the recorded ones."""
    starts, prompts = [0], []
    for prompt, (first, last) in zip(recorded.prompts, pairwise(recorded.starts.tolist()), strict=True):
        for start in range(first, last, length):
            starts.append(min(start + length, last))
            prompts.append(prompt + start - first)
    return replace(recorded, starts=np.array(starts), prompts=np.array(prompts))


def _scaled(point: Point, steps: float = 1.0, drafts: float = 1.0) -> Point:
    factor = steps if point.tokens else drafts
    return replace(point, seconds=tuple(factor * seconds for seconds in point.seconds))


def _cliff(point: Point) -> Point:
    """Steps of more than 12 tokens for a request, or of more than 4 for each, take twice as long."""
    return _scaled(point, 2.0 if point.tokens > max(12, 4 * point.requests) else 1.0)


SITUATIONS = {
    "recorded": Situation(),
    "drift": Situation(real=lambda point: _scaled(point, 0.8, 2.0)),
    "cliff": Situation(measured=_cliff, real=_cliff),
    "nothing pays": Situation(_failing),
    "hopeless": Situation(_hopeless, calibrated=False),
    "half failing": Situation(_half_failing),
    "pays again": Situation(earlier=lambda recorded: _failing(recorded, 0.1)),
    "costly drafts": Situation(measured=partial(_scaled, drafts=4.0), real=partial(_scaled, drafts=4.0)),
    "new texts": Situation(_short),
    "levels": Situation(level=0.8),
}
"""All but the first are made up, on one machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--recorded", type=Path, required=True, metavar="FILE", help="positions that recording.py wrote")
    add("--profile", metavar="NAME_OR_FOLDER", help="step costs (default: all shipped profiles with a calibration)")
    add("--situations", nargs="+", choices=SITUATIONS, default=list(SITUATIONS), metavar="NAME", help="default: all")
    add("--concurrency", default="1,8,32,128", metavar="LIST", help="requests (default: %(default)s)")
    add("--steps", type=int, default=600, metavar="N", help="steps that count (default: %(default)s)")
    add("--resamples", type=int, default=5, metavar="N", help="resamplings of the answers (default: %(default)s)")
    harness.add_output_flags(parser, json="every cell")
    parser.set_defaults(cost="")


def run(args: argparse.Namespace) -> int:
    """Print the mean and lowest cell of each situation and arm; a cell is the median over resampled answers."""
    harness.check_positive(args, "steps", "resamples")
    harness.check_outputs(args)
    sizes = harness.positive_integers("--concurrency", args.concurrency)
    recorded = Positions.load(args.recorded)
    machines = list(machines_of(args, recorded.lookup.shape[1], max(sizes)))
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name in args.situations:
        situation = SITUATIONS[name]
        results[name] = {arm: {} for arm in (*PLANNERS, *WITHOUT)}
        for machine, size in product(machines if name == "recorded" else machines[:1], sizes):
            measure = partial(_goodput, machine, situation, recorded, size, args.steps)
            whole = [measure("", seed) for seed in range(args.resamples)]
            for arm, cells in results[name].items():
                ratios = sorted(measure(arm, seed) / own for seed, own in enumerate(whole))
                spread = statistics.median(ratios), ratios[0], ratios[-1]
                cells[f"{machine.name} {size}"] = [round(ratio, 3) for ratio in spread]
        print(f"\n{name:<36}{'mean':>8}{'lowest':>8}")
        for arm, cells in results[name].items():
            medians = [median for median, _, _ in cells.values()]
            print(f"  {arm:<34}{statistics.mean(medians):>8.3f}{min(medians):>8.3f}", flush=True)
    record.write(args.json, "ablation", results, unit="median, least and most of the resamples")
    return 0


def _goodput(
    machine: Machine, situation: Situation, recorded: Positions, size: int, steps: int, arm: str, seed: int
) -> float:
    points = machine.cost().points
    measured = StepCost(map(situation.measured, points))
    real = StepCost(map(situation.real, points))
    make = partial(
        Drafting.of,
        table=machine.calibration if situation.calibrated else None,
        threshold=LOOKUP_THRESHOLD,
        run=drafters.find("dspark").expected_run_length,
    )
    answers = make(situation.positions(recorded))
    planner = make_planner(arm if arm in PLANNERS else "asynchronous", recorded.lookup.shape[1], measured)
    plain = float(real.seconds(size, np.array([size]), size * float(recorded.prompts.mean()))[0])
    levels = np.where(np.arange(size) % 2, 0.0, situation.level / plain)
    replay = Replay(planner, real, answers, size, seed=seed, levels=levels)
    if arm in WITHOUT and isinstance(planner, Asynchronous):
        WITHOUT[arm](planner)
    before = min(steps, WARM_UP)
    if situation.earlier is not None:
        replay.drafting = make(situation.earlier(recorded))
        replay.run(before, 0)
        replay.drafting = answers
        replay.run(steps, 0)
    else:
        replay.run(steps, before)
    return replay.good / replay.seconds


if __name__ == "__main__":
    sys.exit(script.main(sys.modules[__name__]))
