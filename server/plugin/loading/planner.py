"""Makes the planner that the configuration names, from the profile measured for this server."""

from __future__ import annotations

from pathlib import Path

from outrider.profiles import store
from outrider.scheduler.calibration.model import Calibration
from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.planners.asynchronous import Asynchronous
from outrider.scheduler.planners.base import Planner, Threshold, VerifyAll
from outrider.scheduler.planners.synchronous import Synchronous
from outrider.server.plugin.config import PluginConfig


def load_plan(config: PluginConfig) -> tuple[Planner, StepCost | None, Calibration | None]:
    """Planner, step costs and calibration; without a profile nothing is known of costs, and every draft is verified."""
    if config.drafter == "off" or config.planner == "verify-all":
        return VerifyAll(), None, None
    if config.planner == "threshold":
        return Threshold(config.threshold), None, None
    if not (Path(config.profile) / store.PROFILE).is_file():
        return VerifyAll(), None, None
    profile = store.read(Path(config.profile))
    cost = profile.cost()
    calibration = Calibration.load(profile.calibration) if profile.calibration else None
    planner = Synchronous(cost) if config.planner == "synchronous" else Asynchronous(cost, config.gamma)
    return planner, cost, calibration
