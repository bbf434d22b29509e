"""Learning with a drafter for each API key: what each key's learner offers serves that key alone."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.drafters.learning import keys
from outrider.drafters.learning.answers import ServerState, sweep
from outrider.drafters.learning.progress import append_event

from ..plugin import worker_rpc
from ..settings.learning import DRAFTERS
from .keys.access import Access
from .keys.key_file import Key
from .learning import Learning, newest

logger = logging.getLogger(__name__)

SUMMED = ("answers", "held_out", "tokens", "anchors", "seconds")
MEANS = ("in_use_tau", "candidate_tau")


@dataclass(frozen=True, slots=True)
class Survey:
    """A learner's folder as it is: its state, its newest candidate and its numbers (`progress.Numbers`)."""

    folder: Path
    state: ServerState
    candidate: str | None
    numbers: dict[str, Any]

    @classmethod
    def of(cls, folder: Path) -> Survey:
        """Raises OSError and ValueError where files are damaged."""
        state, numbers = ServerState.read(folder), folder / "learner.json"
        found = json.loads(numbers.read_text()) if numbers.is_file() else {}
        return cls(folder, state, newest(folder, state), found)


@dataclass
class KeyLearning(Learning):
    """Learning of all keys that allow it. Requests name their key's drafter, so the engine is told of none.

    states: of each learner that has answers, as its state.json says; this is its only writer beside
    `outrider learn forget`.
    """

    access: Access = field(kw_only=True)
    states: dict[str, ServerState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._before: dict[str, str | None] = {}
        sweep(self.folder)
        for folder in keys.learners(self.folder):
            state = ServerState.read(folder)
            if state.in_use and not (folder / DRAFTERS / state.in_use / "config.json").is_file():
                state = self._set(folder, None, state, refused=state.in_use)
            self.states[folder.name] = state

    def drafter_of(self, key: Key) -> tuple[str, str]:
        """A key's learner, and which of its drafters serves; "": the drafter of the start."""
        learner = keys.learner_of(key.name)
        state = self.states.get(learner) if key.learn else None
        return learner, (state.in_use or "") if state is not None else ""

    async def _settle(self) -> None:
        """Nothing: a drafter that the engine cannot use is noticed when its key first asks."""

    async def _look(self) -> None:
        """Put each key's newest candidate to use, notice what the engine took back, forget keys that are gone."""
        names = {keys.learner_of(key.name): key.name for key in self.access.keys if key.learn}
        for folder in keys.learners(self.folder):
            if folder.name not in names:
                await self._forget(folder)
        surveys = await asyncio.to_thread(self._surveys, names)
        refused = {each for exchange in await self._exchanges() for each in exchange["refused"]}
        for survey in surveys:
            await self._attend(survey, names[survey.folder.name], refused)
        self._sum(surveys)

    def _surveys(self, names: dict[str, str]) -> list[Survey]:
        """The learners of these keys that there are, but those whose files are damaged."""
        found = []
        for folder in keys.learners(self.folder):
            if folder.name in names:
                try:
                    keys.make(self.folder, names[folder.name])
                    found.append(Survey.of(folder))
                except (OSError, ValueError) as error:
                    logger.warning("learning of key %s: %s", names[folder.name], error)
        return found

    async def _forget(self, folder: Path) -> None:
        """Delete what was learned of a key that is gone, or no longer allows it."""
        logger.warning("what key %s taught its drafter is deleted", keys.name_of(folder) or folder.name)
        self.states.pop(folder.name, None)
        self._before.pop(folder.name, None)
        await asyncio.to_thread(keys.forget_key, folder)
        await worker_rpc.command(self.manager, worker_rpc.DROP_KEY, folder.name)

    async def _attend(self, survey: Survey, key: str, refused: set[str]) -> None:
        """One key's part of a look. refused: drafters that an engine took back, as "learner/name"."""
        folder, state = survey.folder, survey.state
        former = self.states.get(folder.name)
        self.states[folder.name] = state
        if former is not None and former.in_use and not state.in_use:  # by `outrider learn forget`
            await worker_rpc.command(self.manager, worker_rpc.DROP_KEY, folder.name)
        if (worse := state.in_use) and f"{folder.name}/{worse}" in refused:
            before = self._before.pop(folder.name, None)
            if before in state.refused or not (folder / DRAFTERS / (before or "") / "config.json").is_file():
                before = None
            self._set(folder, before, state, refused=worse)
            self.metrics.rollbacks.inc()
            self._note(folder, key, "rollback", drafter=worse, before=before)
        elif survey.candidate is not None:
            await self._try(folder, key, state, survey.candidate)

    async def _try(self, folder: Path, key: str, state: ServerState, name: str) -> None:
        taus = await self._prepare(folder / DRAFTERS / name)
        if taus is None:
            self._set(folder, state.in_use, state, refused=name)
            return
        self._before[folder.name] = state.in_use
        self._set(folder, name, state)
        self.metrics.promotions.inc()
        self.metrics.promoted_at.set_to_current_time()
        self._note(folder, key, "promotion", drafter=name, before=state.in_use, **taus)

    def _set(self, folder: Path, in_use: str | None, state: ServerState, refused: str = "") -> ServerState:
        """Say what is in use from now on, and which candidate is refused."""
        new = ServerState(in_use, state.refused + ((refused,) if refused else ()))
        new.write(folder)
        self.states[folder.name] = new
        return new

    def _note(self, folder: Path, key: str, name: str, **numbers: Any) -> None:
        logger.info("learning of key %s: %s %s", key, name, numbers)
        append_event(folder, name, **numbers)

    def _sum(self, surveys: list[Survey]) -> None:
        """Numbers of all keys together: nothing is shown of a single one."""
        numbers = [survey.numbers for survey in surveys if survey.numbers]
        found: dict[str, Any] = {name: sum(each[name] for each in numbers) for name in SUMMED}
        for name in MEANS:
            known = [each[name] for each in numbers if each.get(name)]
            found[name] = sum(known) / len(known) if known else None
        latest = max(numbers, key=lambda each: each["at"], default={"phase": "waiting"})
        own = self.folder / "learner.json"  # of the process: why it failed
        failure = json.loads(own.read_text()) if own.is_file() else {}
        failed = failure.get("phase") == "failed" and not self.process.running
        shown = {"phase": "failed", "error": failure["error"]} if failed else {"phase": latest["phase"], "error": ""}
        self.numbers = found | shown
        for name in (*SUMMED, *MEANS):
            if found[name] is not None:
                getattr(self.metrics, name).set(found[name])
        self.metrics.in_use.set(sum(1 for state in self.states.values() if state.in_use))
        self.metrics.training.set(self.numbers["phase"] == "training" and self.lifecycle.idle)
        self.metrics.failed.set(failed or not self.process.running)

    def snapshot(self) -> dict[str, Any]:
        """The page's data: sums, and the number of keys with a learned drafter; no key's promotions."""
        learned = sum(1 for state in self.states.values() if state.in_use)
        shown: dict[str, Any] = {"in_use": None, "keys": learned, "exchanges": [], "now": round(time.time(), 3)}
        return self.numbers | shown
