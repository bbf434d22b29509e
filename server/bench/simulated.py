"""The machines and planners that a simulation's flags name."""

import argparse
from collections.abc import Callable, Iterator
from typing import NamedTuple

from outrider.profiles import store
from outrider.scheduler import registry
from outrider.scheduler.baselines import VerifyAll
from outrider.scheduler.calibration.table import CalibrationTable
from outrider.scheduler.contract import Planner
from outrider.scheduler.cost.model import StepCost

from ..errors import UserError
from ..settings import profile_lookup
from .synthetic_cost import SyntheticCost

PLANNERS = ("off", *reversed(registry.PLANNERS))
THRESHOLD = 0.3
WARM_UP = 300
"""Steps before the measurement."""


class Machine(NamedTuple):
    """cost: makes a new cost model at each call, since planners update their model as they learn."""

    name: str
    cost: Callable[[], StepCost]
    calibration: CalibrationTable | None = None


def machines_of(args: argparse.Namespace, gamma: int, largest: int) -> Iterator[Machine]:
    """The named machine; for a recording without a name, all shipped profiles with a calibration."""
    if args.cost or not (args.profile or args.recorded):
        synthetic = _synthetic(args.cost)
        yield Machine(args.cost or "GPU-like", lambda: synthetic.model(gamma, largest))
        return
    if args.profile:
        profiles = [store.locate(args.profile, profile_lookup.roots())]
    else:
        profiles = [profile for profile in store.readable(store.SHIPPED) if profile.calibration]
    for profile in profiles:
        path = profile.calibration if args.recorded else None  # made-up confidences need no calibration
        yield Machine(profile.name, profile.cost, CalibrationTable.load(path) if path else None)


def _synthetic(text: str) -> SyntheticCost:
    numbers = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in SyntheticCost.__dataclass_fields__:
            raise UserError(f"--cost knows {', '.join(SyntheticCost.__dataclass_fields__)}, not {name!r}")
        try:
            numbers[name] = float(value)
        except ValueError:
            raise UserError(f"--cost {name} is a number of milliseconds (knee: of tokens), not {value!r}") from None
    return SyntheticCost(**numbers)


def make_planner(name: str, gamma: int, cost: StepCost) -> Planner:
    """A planner by its name; "threshold=P" sets the threshold planner's least survival."""
    kind, _, value = name.partition("=")
    if kind == "off":
        return VerifyAll(0)
    if kind not in PLANNERS:
        raise UserError(f"--planners knows {', '.join(PLANNERS)}, not {name!r}")
    try:
        threshold = float(value or THRESHOLD)
    except ValueError:
        raise UserError(f"--planners {kind}=P takes a survival in 0..1, not {value!r}") from None
    return registry.make(kind, gamma=gamma, threshold=threshold, cost=cost)
