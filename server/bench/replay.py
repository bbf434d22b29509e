"""`outrider simulate --recorded`: planners on recorded positions of real answers, with measured step times.

`--record` writes a recording: what a drafter and prompt lookup would draft at every token of a target's answers at
temperature 0, and how much of it is accepted. A recording holds no text.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

from outrider.drafters import registry as drafters
from outrider.drafters.lookup_first import LOOKUP_THRESHOLD
from outrider.kernels.cpu import native
from outrider.kernels.drafts import admit
from outrider.profiles import store
from outrider.scheduler.calibration.table import CalibrationTable
from outrider.scheduler.planners import registry
from outrider.scheduler.planners.base import Planner
from outrider.scheduler.planners.baselines import StaticGamma
from outrider.scheduler.simulation.recorded import Drafting, Positions, Replay

from ..errors import UserError
from . import harness

WARM_UP = 300
"""Steps before anything counts."""
LOOKUP_GAMMA = 15
Rows = list[dict[str, Any]]


def record(args: argparse.Namespace) -> int:
    """Writes args.record; raises UserError where there are no prompts."""
    from outrider.drafters.training.target import TargetModel

    from ..model.target import plain_folder
    from .positions import record as recorded

    if not args.prompts:
        raise UserError("--record takes --prompts FILE…, and answers their first --count prompts")
    drafter = store.SHIPPED.parents[1] / "drafters" / "weights" / "smollm2-135m-instruct" / "dspark"
    target = TargetModel.load(plain_folder(args.target))
    found = recorded(target, drafter, args.prompts, count=args.count, new_tokens=args.output, lookup_gamma=LOOKUP_GAMMA)
    found.save(args.record)
    print(f"{len(found.prompts)} answers, {len(found.model)} positions")
    return 0


def run(args: argparse.Namespace) -> Rows:
    """Prints throughput over none without speculation: the median of resampled answers, and the range."""
    sizes = harness.positive_integers("--concurrency", args.concurrency)
    names = [name for name in args.planners.split(",") if name and name != "off"]
    positions = Positions.load(args.recorded)
    rows: Rows = []
    print(f"{'profile':<44} {'requests':>8} " + "".join(f"{name:>26}" for name in names))
    for profile in _profiles(args.profile):
        table = CalibrationTable.load(profile.calibration) if profile.calibration else None
        drafting = Drafting.of(positions, table, LOOKUP_THRESHOLD, drafters.find("dspark").expected_run_length)
        for size in sizes:
            measure = partial(_throughput, profile, drafting, size, steps=args.steps)
            plain = [measure("off", seed=seed) for seed in range(args.resamples)]
            cells = []
            for name in names:
                found = [measure(name, seed=seed) / own for seed, own in enumerate(plain)]
                rows.append({"profile": profile.name, "requests": size, "planner": name, "ratios": found})
                cells.append(f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})")
            print(f"{profile.name:<44} {size:>8} " + "".join(f"{cell:>26}" for cell in cells), flush=True)
    return rows


def _profiles(wanted: str | None) -> Iterator[store.Profile]:
    """The profile of this name, or all shipped ones with a calibration."""
    from ..settings import profile_lookup

    if wanted:
        yield store.locate(wanted, profile_lookup.roots())
        return
    yield from (profile for profile in store.readable(store.SHIPPED) if profile.calibration)


def _throughput(profile: store.Profile, drafting: Drafting, size: int, name: str, *, seed: int, steps: int) -> float:
    planner: Planner = StaticGamma(0)
    if name != "off":
        entry = registry.find(name)
        planner = registry.make(
            name, gamma=LOOKUP_GAMMA, threshold=0.3, cost=profile.cost() if entry.needs_profile else None
        )
    planner.admit_by = admit if native.available() else None
    return Replay(planner, profile.cost(), drafting, size, seed=seed).run(steps, WARM_UP)
