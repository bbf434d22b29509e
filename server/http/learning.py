"""Run the learner while the server is idle, and promote the drafters that it offers."""

import asyncio
import contextlib
import json
import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import Counter, Gauge

from outrider.drafters.learning.answers import ServerState, candidate_names
from outrider.drafters.learning.progress import append_event
from outrider.profiles import store
from outrider.scheduler.calibration.classes import CLASSES
from outrider.scheduler.calibration.fit import fit_joint, unless_worse
from outrider.scheduler.calibration.records import Records
from outrider.scheduler.calibration.table import CalibrationTable
from outrider.storage.replacing import replace

from ..plugin import worker_rpc
from ..plugin.loading.from_profile import CALIBRATION
from ..processes.learner import LearnerProcess
from ..settings.learning import DRAFTERS
from ..settings.settings import Settings
from .lifecycle import Lifecycle

logger = logging.getLogger(__name__)

QUIET_SECONDS = 1.0
"""Idle time before the learner continues. A request pauses it at once."""
LOOK_SECONDS = 2.0
"""Time between two checks of the learner's candidates and the engine's drafter."""
RESTART_SECONDS = 60.0
"""Time until an ended learner is restarted."""
SHOWN_EVENTS = 64
"""Promotions and rollbacks that the page shows at most."""
SUMMED = ("answers", "held_out", "tokens", "anchors", "seconds")
MEANS = ("in_use_tau", "candidate_tau")
"""Numbers of a learner that metrics show; for several learners, sums of SUMMED and means of MEANS."""
GREEDY = CLASSES.index("greedy, model")


class LearningMetrics:
    """Prometheus metrics of learning."""

    def __init__(self) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"outrider_learn_{name}", text, multiprocess_mode="livemax")

        self.answers = gauge("answers", "Answers that the drafter is trained on.")
        self.held_out = gauge("held_out_answers", "Answers that are kept to judge drafters, and never trained on.")
        self.tokens = gauge("tokens", "Tokens of both, prompts included.")
        self.anchors = gauge("anchors", "Drafts that were trained on since the folder was made.")
        self.seconds = gauge("seconds", "Seconds of processor time spent training since the folder was made.")
        self.in_use_tau = gauge("in_use_tau", "Tokens a step of the drafter in use, on answers that none has seen.")
        self.candidate_tau = gauge("candidate_tau", "The same of the drafter in training.")
        self.in_use = gauge(
            "in_use", "Number of the learned drafter that serves; 0: that of the start. With --learn-per: how many do."
        )
        self.training = gauge("training", "1 while the learner trains, 0 while it waits.")
        self.failed = gauge("failed", "1 while the learner cannot go on.")
        self.promoted_at = gauge("last_promotion_seconds", "When a learned drafter was last put to use, in unix time.")
        self.promotions = Counter("outrider_learn_promotions", "Learned drafters that were put to use.")
        self.rollbacks = Counter("outrider_learn_rollbacks", "Learned drafters that were taken back.")


@dataclass
class Learning:
    """One server's learning. state: content of state.json, which else only `outrider learn forget` writes."""

    settings: Settings
    manager: Any
    lifecycle: Lifecycle
    state: ServerState = field(init=False)
    metrics: LearningMetrics = field(default_factory=LearningMetrics)

    def __post_init__(self) -> None:
        assert self.settings.learn_folder is not None
        self.folder: Path = self.settings.learn_folder
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.process = LearnerProcess(self.settings)
        self.state = ServerState.read(self.folder)
        self.numbers: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []

    async def run(self) -> None:
        """Learn until cancelled."""
        pausing = asyncio.create_task(self._go_on_while_idle())
        work, start_at = self._settle, -math.inf
        try:
            while True:
                try:
                    if time.monotonic() > start_at:
                        start_at = math.inf
                        self._start()
                    await work()
                    work = self._look
                except (OSError, ValueError, worker_rpc.EngineFailed) as error:  # a full disk, a changed folder
                    logger.warning("learning: %s", error)
                await asyncio.sleep(LOOK_SECONDS)
                if start_at == math.inf and not self.process.running:
                    logger.warning("the learner has ended: %s", self.numbers.get("error") or "it was killed")
                    start_at = time.monotonic() + RESTART_SECONDS
        finally:
            pausing.cancel()
            self.process.end()

    def _start(self) -> None:
        self.process.start()
        if not self.lifecycle.idle:
            self.process.pause()

    async def _go_on_while_idle(self) -> None:
        while True:
            await self.lifecycle.wait_until_quiet(QUIET_SECONDS)
            self.process.go_on()
            await self.lifecycle.wait_for_request()
            self.process.pause()

    async def _settle(self) -> None:
        """Refuse the drafter that state.json names unless all engines use it: its files may be missing or damaged."""
        exchanges = await self._exchanges()
        if self.state.in_use and any(each["in_use"] != self._path(self.state.in_use) for each in exchanges):
            self._write(None, refused=self.state.in_use)

    async def _look(self) -> None:
        """Record a rollback by the engine, promote the newest candidate, and read the learner's numbers."""
        self.state = ServerState.read(self.folder)  # `outrider learn forget` may have written it
        await self._notice_rollback()
        if name := newest(self.folder, self.state):
            await self._promote(name)
        self._read_numbers()

    async def _promote(self, name: str) -> None:
        folder = Path(self._path(name))
        taus = await self._prepare(folder)
        if taus is None:
            self._write(self.state.in_use, refused=name)
            return
        await worker_rpc.command(self.manager, worker_rpc.USE, str(folder))
        if any(each["in_use"] != str(folder) for each in await self._exchanges()):
            self._write(self.state.in_use, refused=name)
            return
        before = self.state.in_use
        self._write(name)
        self.events.append(self._note("promotion", self.folder, drafter=name, before=before, **taus))

    async def _prepare(self, folder: Path) -> dict[str, Any] | None:
        """Write a candidate's calibration and return its taus; log an unusable candidate and return None."""
        try:
            gate = json.loads((folder / "gate.json").read_text())
            await asyncio.to_thread(write_calibration, folder, self.settings.profile)
            return {"tau": gate["candidate_tau"], "tau_before": gate["in_use_tau"]}
        except Exception as error:  # its files may be damaged in any way
            logger.warning("the learned drafter %s is not used: %s", folder.name, str(error) or repr(error))
            return None

    async def _notice_rollback(self) -> None:
        """Give all engines the drafter in use; if one took it back, give all the drafter that it returned to, or that
        of the start if one cannot use it."""
        exchanges, worse = await self._exchanges(), self.state.in_use
        wanted = self._path(worse) if worse else ""
        if not (different := [each["in_use"] for each in exchanges if each["in_use"] != wanted]):
            return
        if not worse or not any(wanted in each["refused"] for each in exchanges):
            # The user deleted the drafters, or an engine or the disk refused a promotion.
            await worker_rpc.command(self.manager, worker_rpc.USE, wanted)
            return
        refused = {self._path(name) for name in self.state.refused}.union(*(each["refused"] for each in exchanges))
        now = next((folder for folder in different if folder not in refused), "")
        await worker_rpc.command(self.manager, worker_rpc.USE, now)
        self._write(Path(now).name if now else None, refused=worse)
        self.events.append(self._note("rollback", self.folder, drafter=worse, before=self.state.in_use))

    async def _exchanges(self) -> list[dict[str, Any]]:
        return [state["exchange"] for state in await worker_rpc.read_live(self.manager)]

    def _path(self, name: str) -> str:
        return str(self.folder / DRAFTERS / name)

    def _write(self, in_use: str | None, refused: str = "") -> None:
        """Record the drafter in use, and a refused candidate."""
        new = ServerState(in_use, self.state.refused + ((refused,) if refused else ()))
        new.write(self.folder)
        self.state = new

    def _note(self, event: str, folder: Path, **numbers: Any) -> dict[str, Any]:
        """Count and log a promotion or a rollback, and keep it for `outrider learn status`. folder: the learner's."""
        if event == "promotion":
            self.metrics.promotions.inc()
            self.metrics.promoted_at.set_to_current_time()
        else:
            self.metrics.rollbacks.inc()
        logger.info("learning: %s in %s: %s", event, folder, numbers)
        return append_event(folder, event, **numbers)

    def snapshot(self) -> dict[str, Any]:
        """Return the page's data: the learner's numbers, drafter in use, last promotions and rollbacks, time."""
        shown = {"in_use": self.state.in_use, "exchanges": self.events[-SHOWN_EVENTS:], "now": round(time.time(), 3)}
        return self.numbers | shown

    def _read_numbers(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # the learner may end before it has written anything
            self.numbers = json.loads((self.folder / "learner.json").read_text())
        self._show_numbers(int(self.state.in_use or 0))

    def _show_numbers(self, in_use: int) -> None:
        """Set the metrics. in_use: see `LearningMetrics`."""
        for name in (*SUMMED, *MEANS):
            if (value := self.numbers.get(name)) is not None:
                getattr(self.metrics, name).set(value)
        phase = self.numbers.get("phase")
        self.metrics.in_use.set(in_use)
        self.metrics.training.set(phase == "training" and self.lifecycle.idle)
        self.metrics.failed.set(phase == "failed" or not self.process.running)


def newest(folder: Path, state: ServerState) -> str | None:
    """Return a learner's newest candidate that was not refused, if newer than the drafter in use; else None."""
    known = candidate_names(folder)
    return max((n for n in known if n > (state.in_use or "") and n not in state.refused), default=None)


def write_calibration(folder: Path, profile: str | None) -> None:
    """Fit a learned drafter's calibration and write it; do nothing if the profile has no calibration.

    Only the class of greedy model drafts is fitted, on half of the held-out answers. If that is worse than raw
    confidences on the other half, those are used. All other classes keep the profile's calibration.
    """
    served_profile = store.read(Path(profile)) if profile and (Path(profile) / store.PROFILE).is_file() else None
    if served_profile is None or served_profile.calibration is None:
        return
    table = CalibrationTable.load(served_profile.calibration)
    with np.load(folder / "held-out.npz") as kept:
        confidence, reach, accepted = kept["confidence"], kept["reach"], kept["accepted"]
        even = kept["answer"] % 2 == 0
    confidence = np.pad(confidence, ((0, 0), (0, table.gamma)), constant_values=0.5)[:, : table.gamma]
    reach = np.minimum(reach, table.gamma)
    records = Records(confidence, reach, np.minimum(accepted, reach), np.full(len(reach), GREEDY))
    judge = records.select(~even)
    greedy = unless_worse(fit_joint(records.select(even), held_out=judge), judge)
    by_class = tuple(greedy if place == GREEDY else each for place, each in enumerate(table.by_class))
    dataset = f"{len(records)} drafts of answers held out"
    fitted = CalibrationTable(by_class, dataset, table.verification)
    replace({folder / CALIBRATION: json.dumps(fitted.to_json()) + "\n"}, 0o600)
