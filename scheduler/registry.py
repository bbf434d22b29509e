"""Every planner by name: the one list that settings, flags, messages and the plugin read.

To add a planner, write its module and its entry here, then run `make format`. Entries name their module instead of
importing it, because command lines need the names alone, and torch takes seconds to import.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .contract import Planner
    from .cost.model import StepCost


@dataclass(frozen=True, slots=True)
class PlannerEntry:
    """One planner.

    make: "module:callable" that makes it.
    takes: its keyword arguments, out of gamma (draft tokens per step), cost (`StepCost`, from a measured profile) and
        threshold (a survival in 0..1).
    help: a few words for `outrider serve --help` and server/README.md.
    """

    make: str
    takes: tuple[str, ...]
    help: str

    @property
    def needs_profile(self) -> bool:
        return "cost" in self.takes


PLANNERS = {
    "asynchronous": PlannerEntry(
        "outrider.scheduler.planner:Asynchronous", ("cost", "gamma"), "most tokens per second, as measured"
    ),
    "synchronous": PlannerEntry(
        "outrider.scheduler.baselines:Synchronous", ("cost",), "tokens that raise throughput, as measured"
    ),
    "threshold": PlannerEntry(
        "outrider.scheduler.baselines:Threshold", ("threshold",), "tokens whose survival is high enough"
    ),
    "verify-all": PlannerEntry("outrider.scheduler.baselines:VerifyAll", (), "every drafted token"),
}


def find(name: str) -> PlannerEntry:
    """Raises ValueError with the known names."""
    if name not in PLANNERS:
        raise ValueError(f"a planner is one of {', '.join(PLANNERS)}, not {name!r}")
    return PLANNERS[name]


def make(name: str, *, gamma: int, threshold: float, cost: StepCost | None = None) -> Planner:
    """The planner of that name. Raises ValueError for a name that is not known and for costs that it lacks."""
    entry = find(name)
    if entry.needs_profile and cost is None:
        raise ValueError(f"the planner {name} needs measured step costs")
    known = {"gamma": gamma, "cost": cost, "threshold": threshold}
    planner: Planner = pkgutil.resolve_name(entry.make)(**{argument: known[argument] for argument in entry.takes})
    return planner
