"""Microseconds that each planner takes per decode step, without an engine.

A step is `budget`, `admit` and `observe` for a batch of requests of which some leave and others join. Confidences are
random and calibrated: acceptance is drawn from them. The cost model is a made-up grid with cliffs, and learns from
every step. Planners take turns, round by round.

examples:
  outrider bench micro plan --requests 512 --levels
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch

from outrider.kernels.cpu import native
from outrider.kernels.drafts import admit
from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.cost.step_times import Point
from outrider.scheduler.planners import registry
from outrider.scheduler.planners.admission import survival_of
from outrider.scheduler.planners.base import FinishedStep, Planner, StepView
from outrider.scheduler.planners.baselines import StaticGamma

from .. import harness, record

STAGES = ("budget", "admit", "observe")
LEAVE = 0.01
"""Share of the requests that leave after a step, and are replaced."""
WARM_STEPS = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--requests", type=int, default=256, metavar="N", help="requests of a step (default: %(default)s)")
    add("--gamma", type=int, default=7, metavar="N", help="draft tokens of each (default: %(default)s)")
    add("--steps", type=int, default=500, metavar="N", help="steps of a round (default: %(default)s)")
    add("--rounds", type=int, default=7, metavar="N", help="measurements of each planner (default: %(default)s)")
    add("--levels", action="store_true", help="a third of the requests asks for a service level")
    harness.add_output_flags(parser, json="every round's median")


def run(args: argparse.Namespace) -> int:
    harness.check_positive(args, "requests", "gamma", "steps", "rounds")
    harness.check_outputs(args)
    torch.set_num_threads(1)
    planners: dict[str, Planner] = {"static gamma": StaticGamma(max(args.gamma // 2, 1))}
    for name in reversed(registry.names()):
        cost = jagged_cost(args.requests, args.gamma)
        planner = planners[name.replace("-", " ")] = registry.make(name, gamma=args.gamma, threshold=0.3, cost=cost)
        planner.admit_by = admit if native.available() else None
    results: dict[str, dict[str, list[float]]] = {name: {s: [] for s in (*STAGES, "total")} for name in planners}
    for number, _, name in harness.alternate_arms(args.rounds, [f"{args.requests} requests"], list(planners)):
        times = measure(planners[name], args.requests, args.gamma, args.steps, levels=args.levels, seed=number)
        for stage, median in zip(STAGES, np.median(times, axis=0), strict=True):
            results[name][stage].append(float(median))
        results[name]["total"].append(float(np.median(times.sum(1))))
    print(f"{'planner':>14} {'budget':>8} {'admit':>8} {'observe':>8} {'step us':>8}  spread of the step over rounds")
    for name, found in results.items():
        columns = " ".join(f"{statistics.median(found[stage]):8.1f}" for stage in (*STAGES, "total"))
        print(f"{name:>14} {columns}  {min(found['total']):.1f} to {max(found['total']):.1f}")
    record.write(args.json, "micro plan", results, requests=args.requests)
    return 0


def measure(planner: Planner, requests: int, gamma: int, steps: int, *, levels: bool, seed: int) -> np.ndarray:
    """[steps, 3] microseconds of budget, admit and observe."""
    rng = np.random.default_rng(seed)
    confidences = [torch.from_numpy(rng.beta(5, 1, (requests, gamma)).astype(np.float32)) for _ in range(16)]
    outcomes = [(torch.rand(c.shape) < c).long().cumprod(1).sum(1).numpy() for c in confidences]
    planner.block = gamma
    times = []
    for number, step in enumerate(traffic(rng, requests, gamma, WARM_STEPS + steps, levels)):
        confidence, outcome = confidences[number % 16], outcomes[number % 16]
        survival = survival_of(confidence).numpy()
        start = time.perf_counter()
        budget = planner.budget(step)
        planned = time.perf_counter()
        verify_lens = torch.zeros(requests, dtype=torch.int64)
        if budget.draft:
            verify_lens = planner.admit(confidence, torch.full((requests,), budget.depth or gamma), budget)
        admitted = time.perf_counter()
        verified = verify_lens.numpy()
        accept_lens = np.minimum(verified, outcome) + 1
        seconds = budget.predicted_seconds(int(verified.sum()))
        before = time.perf_counter()
        mask, tokens = budget.draft_mask(step.limits), requests + int(np.add.reduce(verified))
        planner.observe(
            FinishedStep(
                step, survival, verified, accept_lens, mask, int(np.count_nonzero(mask)), tokens=tokens, seconds=seconds
            )
        )
        times.append((planned - start, admitted - planned, time.perf_counter() - before))
    return np.array(times[WARM_STEPS:]) * 1e6


def traffic(rng: np.random.Generator, requests: int, gamma: int, steps: int, levels: bool) -> Iterator[StepView]:
    """Steps of a full batch; each step some requests leave, and others take their rows."""
    rows = rng.permutation(2 * requests)[:requests]
    generations, contexts = np.ones(requests, dtype=np.int64), rng.integers(64, 1024, requests)
    asked = np.where(np.arange(requests) % 3 == 0, 20.0 if levels else 0.0, 0.0)
    for _ in range(steps):
        yield StepView(
            rows=rows,
            generations=generations.copy(),
            contexts=contexts.copy(),
            limits=np.full(requests, gamma),
            levels=asked,
            progress=rng.uniform(15, 40, requests),
        )
        left = rng.random(requests) < LEAVE
        generations += left
        contexts = np.where(left, 64, contexts + 3)


def jagged_cost(requests: int, gamma: int) -> StepCost:
    """Times of a machine that is bound by memory at first and has a cliff at every power of two of its tokens."""
    sizes = sorted({1 << k for k in range(requests.bit_length())} | {requests})
    points = []
    for size in sizes:
        for per_request in range(1, gamma + 2):
            tokens = size * per_request
            compute = 2e-5 * tokens + 1e-3 * (tokens - 1).bit_length()
            points += [
                Point(size, tokens, size * context, (8e-3 + compute + 2e-9 * size * context,))
                for context in (128, 1024)
            ]
        points.append(Point(size, 0, size * 128, (1e-3 + 5e-6 * size,)))
    return StepCost(points)
