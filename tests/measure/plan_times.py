"""Microseconds that each planner takes per decode step, without an engine.

A step is `budget`, `admit` and `observe` for a batch in which requests end and begin: a replay of made-up answers
(`outrider simulate`) with correct confidences. The cost model learns from every step. Planners take turns, round by
round.

examples:
  python tests/measure/plan_times.py --requests 512 --levels
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import script

from outrider.drafters.lookup_first import LOOKUP_THRESHOLD
from outrider.scheduler import registry
from outrider.scheduler.baselines import VerifyAll
from outrider.scheduler.contract import Planner
from outrider.server.bench import harness, record
from outrider.server.bench.replay import Drafting, Positions, Replay
from outrider.server.bench.synthetic_cost import SyntheticCost

STAGES = ("budget", "admit", "observe")
WARM_STEPS = 50
LEVEL = 20.0
"""Service level of every third request with --levels, tokens per second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--requests", type=int, default=256, metavar="N", help="requests of a step (default: %(default)s)")
    add("--gamma", type=int, default=7, metavar="N", help="draft tokens of each (default: %(default)s)")
    add("--steps", type=int, default=500, metavar="N", help="steps of a round (default: %(default)s)")
    add("--rounds", type=int, default=7, metavar="N", help="measurements of each planner (default: %(default)s)")
    add("--levels", action="store_true", help="a third of the requests asks for a service level")
    harness.add_output_flags(parser, json="every round's mean")


def run(args: argparse.Namespace) -> int:
    harness.check_positive(args, "requests", "gamma", "steps", "rounds")
    harness.check_outputs(args)
    costs = SyntheticCost()
    planners: dict[str, Planner] = {"static gamma": VerifyAll(max(args.gamma // 2, 1))}
    for name in reversed(registry.PLANNERS):
        cost = costs.model(args.gamma, args.requests)
        planners[name.replace("-", " ")] = registry.make(name, gamma=args.gamma, threshold=0.3, cost=cost)
    steps = {name: timed(planner) for name, planner in planners.items()}
    results: dict[str, dict[str, list[float]]] = {name: {s: [] for s in (*STAGES, "total")} for name in planners}
    drafting = Drafting.of(Positions.made_up([0.83] * args.gamma, 256, 128), None, LOOKUP_THRESHOLD, 1.7)
    levels = np.where(np.arange(args.requests) % 3 == 0, LEVEL if args.levels else 0.0, 0.0)
    real = costs.model(args.gamma, args.requests)
    for number, _, name in harness.alternate_arms(args.rounds, [f"{args.requests} requests"], list(planners)):
        steps[name].clear()
        Replay(planners[name], real, drafting, args.requests, seed=number, levels=levels).run(args.steps, WARM_STEPS)
        times = np.array([[step[stage] for stage in STAGES] for step in steps[name][WARM_STEPS:]]) * 1e6
        for stage, mean in zip(STAGES, times.mean(0), strict=True):  # a plan holds for some steps
            results[name][stage].append(float(mean))
        results[name]["total"].append(float(times.sum(1).mean()))
    print(f"{'planner':>14} {'budget':>8} {'admit':>8} {'observe':>8} {'step us':>8}  spread of the step over rounds")
    for name, found in results.items():
        columns = " ".join(f"{statistics.median(found[stage]):8.1f}" for stage in (*STAGES, "total"))
        print(f"{name:>14} {columns}  {min(found['total']):.1f} to {max(found['total']):.1f}")
    record.write(args.json, "micro plan", results, requests=args.requests)
    return 0


def timed(planner: Planner) -> list[dict[str, float]]:
    """Make a planner record the seconds of each stage, step by step; returns the record."""
    steps: list[dict[str, float]] = []

    def noting(stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            if stage == STAGES[0]:
                steps.append(dict.fromkeys(STAGES, 0.0))
            start = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                steps[-1][stage] += time.perf_counter() - start

        return noted

    for stage in STAGES:
        setattr(planner, stage, noting(stage, getattr(planner, stage)))
    return steps


if __name__ == "__main__":
    sys.exit(script.main(sys.modules[__name__]))
