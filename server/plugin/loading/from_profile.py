"""Makes the configured planner, step costs and draft graphs from the profile measured for this server."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

from outrider.profiles import store
from outrider.profiles.draft_graphs import by_temperature
from outrider.scheduler import registry
from outrider.scheduler.baselines import VerifyAll
from outrider.scheduler.calibration.table import CalibrationTable
from outrider.scheduler.contract import Planner
from outrider.scheduler.cost.prefill import PrefillPoint
from outrider.scheduler.spiffy.calibration import untuned_graph
from outrider.scheduler.spiffy.graph import DraftGraph
from outrider.scheduler.spiffy.learning import RoundCost

from ..config import PluginConfig

logger = logging.getLogger(__name__)

CALIBRATION = "calibration.json"
"""File in a learned drafter's folder with its own calibration, which replaces the profile's."""


def measured_profile(config: PluginConfig) -> store.Profile | None:
    """Return the server's profile; None where there is none. Raises ValueError for an unreadable one."""
    folder = Path(config.profile)
    return store.read(folder) if (folder / store.PROFILE).is_file() else None


def load_plan(config: PluginConfig, learned: str = "") -> tuple[Planner, CalibrationTable | None]:
    """Return planner and calibration; without a profile costs are unknown, and every draft is verified. learned: folder
    of the drafter that serves in place of the configured one."""
    if config.drafter == "off":
        return VerifyAll(), None
    if not registry.find(config.planner).needs_profile:
        return registry.make(config.planner, gamma=config.longest, threshold=config.threshold), None
    if (profile := measured_profile(config)) is None:
        return VerifyAll(), None
    learned_calibration = Path(learned) / CALIBRATION
    fitted = learned_calibration if learned and learned_calibration.is_file() else profile.calibration
    calibration = load_calibration(fitted, config.longest) if fitted else None
    if calibration is not None and calibration.verification != config.verification:
        logger.info(
            "Profile %s was calibrated with --verification %s, not %s: `outrider tune` does so anew",
            profile.name, calibration.verification, config.verification,
        )  # fmt: skip
    planner = registry.make(config.planner, gamma=config.longest, threshold=config.threshold, cost=profile.cost())
    return planner, calibration


def load_prefills(config: PluginConfig) -> tuple[PrefillPoint, ...]:
    """Return measured chunks of prompts; none where the profile is missing or unreadable."""
    try:
        profile = measured_profile(config)
    except ValueError as error:
        logger.warning("times of prompts are learnt while serving them: %s", error)
        return ()
    return () if profile is None else profile.prefills


def load_calibration(path: Path, longest: int) -> CalibrationTable:
    """Load a calibration for drafts of `longest` tokens; a drafter may have learned on a server that drafted more.
    Raises ValueError naming the file."""
    table = CalibrationTable.load(path)
    if table.gamma > longest:
        logger.warning("%s is for drafts of %d tokens: its first %d positions are used", path, table.gamma, longest)
    return table.first(longest)


def plan_again(plan_by: Callable[[Planner, CalibrationTable | None], None], config: PluginConfig, learned: str) -> None:
    """Plan by the profile on disk; if it cannot be read, keep the plan. learned: as in `load_plan`."""
    try:
        plan_by(*load_plan(config, learned))
    except (OSError, ValueError) as error:
        logger.warning("planning goes on as before: %s", error)


def load_round_cost(config: PluginConfig) -> RoundCost:
    """Return the costs of rounds of block diffusion; without a profile they are learned while serving."""
    assert config.diffusion is not None
    profile = measured_profile(config)
    return RoundCost(None if profile is None else profile.cost(), config.diffusion.block_size)


def load_graphs(config: PluginConfig) -> dict[bool, DraftGraph]:
    """Return draft graphs by whether a request is sampled; without a profile the same untuned graph for both."""
    assert config.diffusion is not None
    if (profile := measured_profile(config)) is None:
        untuned = untuned_graph(config.diffusion.block_size, config.step_tokens)
        return {False: untuned, True: untuned}
    if profile.graphs is None:
        raise ValueError(f"profile {profile.name} has no draft graphs; measure anew: outrider tune")
    graphs = by_temperature(json.loads(profile.graphs.read_text()))
    return {False: graphs["greedy"], True: graphs["sampled"]}
