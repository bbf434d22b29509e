"""Part D: step times and calibration of this GPU, and throughput by load without drafts, with all, and as planned."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from outrider.kernels.cache import cache_root
from outrider.profiles import store
from outrider.profiles.store import Profile
from outrider.scheduler.calibration.classes import CLASSES
from outrider.scheduler.calibration.table import CalibrationTable

from .commands import PROMPTS, Commands
from .report import Measured

PROFILE = "gpu-check"
MOST_REQUESTS = 256
WORTH = 0.97
"""Of the better of the other two, that planning has to bring."""


def tuned(commands: Commands) -> Iterator[Measured]:
    """A profile, which servers on this machine then find; the command goes on where it was ended."""
    effort = ["--quick", "--max-requests", "2"] if commands.tiny else ["--max-requests", str(MOST_REQUESTS)]
    name = PROFILE + "-tiny" * commands.tiny
    commands.outrider("tune", "tune", *_device(commands), "--rounds", "1", *effort, "--name", name)
    found = store.read(cache_root() / "profiles" / name)
    yield from step_times(found)
    if found.calibration is not None:
        table = CalibrationTable.load(found.calibration)
        for case, fitted in zip(CLASSES, table.by_class, strict=True):
            if any(fitted.samples):
                before, after = (100 * errors[0] for errors in (fitted.ece_before, fitted.ece_after))
                yield Measured(f"calibration error, first token, {case}", before, f"% before, {after:.3g} after")
    if commands.tiny:  # servers would plan by it
        shutil.rmtree(cache_root() / "profiles" / name)


def step_times(profile: Profile) -> Iterator[Measured]:
    """One row for each number of requests and tokens, at its shortest context; drafts by requests."""
    shortest: dict[tuple[int, int, bool], tuple[float, float]] = {}
    for point in profile.points:
        key = point.requests, point.tokens, point.drafted
        shortest[key] = min(shortest.get(key, (point.context, point.median)), (point.context, point.median))
    for (requests, tokens, drafted), (_, seconds) in sorted(shortest.items()):
        what = f"draft, {requests} requests" if drafted else f"step, {requests} requests, {tokens} tokens"
        yield Measured(what, seconds * 1e3, "ms")


@dataclass(frozen=True, slots=True)
class Load:
    """So many requests in flight on an engine whose arms take turns."""

    requests: int

    def __call__(self, commands: Commands) -> Iterator[Measured]:
        requests = min(self.requests, 2) if commands.tiny else self.requests
        name, tokens, rounds = f"load-{self.requests}", "8" if commands.tiny else "128", "1" if commands.tiny else "3"
        commands.outrider(
            name, "bench", "load", *_device(commands), "--prompts", PROMPTS, "--concurrency", str(requests),
            "--new-tokens", tokens, "--rounds", rounds, "--count", str(2 * requests),
            "--json", commands.folder / f"{name}.json",
        )  # fmt: skip
        arms = commands.read(name)[str(requests)]
        rates = {arm: median(one["throughput"] for one in taken) for arm, taken in arms.items()}
        for arm, rate in rates.items():
            yield Measured(f"{requests} requests, {arm}", rate, "tokens/s")
        share = rates["planned"] / max(rate for arm, rate in rates.items() if arm != "planned")
        wanted = None if commands.tiny else WORTH
        yield Measured(f"{requests} requests, planned", share, "of the better of the others", at_least=wanted)


load_1, load_8, load_64, load_256 = (Load(requests) for requests in (1, 8, 64, MOST_REQUESTS))


def _device(commands: Commands) -> list[str]:
    return ["--device", commands.device.on.type]
