"""Learning with a drafter for each owner: each API key, or each LoRA adapter and the model. A learned drafter serves
its owner's requests alone."""

import asyncio
import contextlib
import json
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from outrider.drafters.learning import owners
from outrider.drafters.learning.answers import KEYS, ServerState, sweep
from outrider.drafters.learning.owners import MODEL, Owner

from ..plugin import worker_rpc
from ..plugin.options import OwnDrafter
from ..settings.learning import DRAFTERS
from .adapters import Adapters
from .keys.access import Access
from .keys.key_file import Key
from .learning import MEANS, SUMMED, Learning, newest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Survey:
    """Content of a learner's folder: its state, its newest candidate and its numbers (`progress.Numbers`)."""

    learner: str
    owner: Owner
    state: ServerState
    candidate: str | None
    numbers: dict[str, Any]


@dataclass
class OwnerLearning(Learning, ABC):
    """Learning of several owners. Each request names its owner's drafter, so a promotion needs no command.

    states: content of state.json of each learner with requests or answers. Besides this class only
    `outrider learn forget` writes it.
    """

    states: dict[str, ServerState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._before: dict[str, str | None] = {}
        sweep(self.folder)

    @abstractmethod
    def owners(self) -> dict[str, Owner]:
        """Return the owners that learn now, by the names of their learners."""

    @abstractmethod
    def drafter_of(self, key: Key | None, model: str) -> OwnDrafter:
        """Return the drafter for a request of a key to the model or an adapter."""

    @abstractmethod
    async def _leave(self, known: dict[str, Owner]) -> None:
        """Drop the learners of unknown owners."""

    def _in_use(self, learner: str) -> str:
        """Return the name of the learned drafter in use, read at the first request; "" for the server's own."""
        if learner not in self.states:
            folder = self.folder / learner
            state = ServerState.read(folder)
            if state.in_use and not (folder / DRAFTERS / state.in_use / "config.json").is_file():
                state = ServerState(None, (*state.refused, state.in_use))
                with contextlib.suppress(OSError):  # a full disk fails no request
                    state.write(folder)
            self.states[learner] = state
        return self.states[learner].in_use or ""

    async def _settle(self) -> None:
        """Leave the check of drafters to `_in_use`."""

    async def _look(self) -> None:
        """Drop owners that are gone; promote candidates and record rollbacks of the rest."""
        known = self.owners()
        await self._leave(known)
        surveys = await asyncio.to_thread(self._surveys, known)
        refused = {each for exchange in await self._exchanges() for each in exchange["refused"]}
        for survey in surveys:
            await self._attend(survey, refused)
        self._sum(surveys)

    def _surveys(self, known: dict[str, Owner]) -> list[Survey]:
        """Return the contents of these owners' folders that exist. Damaged ones are logged and left out."""
        surveys = []
        for learner, owner in known.items():
            folder = self.folder / learner
            if folder.is_dir():
                try:
                    if learner != MODEL:
                        owners.make(self.folder, owner)
                    state, path = ServerState.read(folder), folder / "learner.json"
                    numbers = json.loads(path.read_text()) if path.is_file() else {}
                    surveys.append(Survey(learner, owner, state, newest(folder, state), numbers))
                except (OSError, ValueError) as error:
                    logger.warning("learning of %s: %s", owner, error)
        return surveys

    async def _drop(self, learner: str) -> None:
        """Forget a learner here and in the engine's memory."""
        self.states.pop(learner, None)
        self._before.pop(learner, None)
        await worker_rpc.command(self.manager, worker_rpc.DROP_OWNER, learner)

    async def _attend(self, survey: Survey, refused: set[str]) -> None:
        """Promote one owner's candidate or undo a promotion. refused: taken back by engines, as "learner/name"."""
        learner, state = survey.learner, survey.state
        drafters = self.folder / learner / DRAFTERS
        former = self.states.get(learner)
        self.states[learner] = state
        if former is not None and former.in_use and not state.in_use:  # by `outrider learn forget`
            await worker_rpc.command(self.manager, worker_rpc.DROP_OWNER, learner)
        if (worse := state.in_use) and f"{learner}/{worse}" in refused:
            before = self._before.pop(learner, None)
            if before in state.refused or not (drafters / (before or "") / "config.json").is_file():
                before = None
            self._set(learner, before, refused=worse)
            self._note("rollback", self.folder / learner, drafter=worse, before=before)
        elif (name := survey.candidate) is not None:
            taus = await self._prepare(drafters / name)
            if taus is None:
                self._set(learner, state.in_use, refused=name)
                return
            self._before[learner] = state.in_use
            self._set(learner, name)
            self._note("promotion", self.folder / learner, drafter=name, before=state.in_use, **taus)

    def _set(self, learner: str, in_use: str | None, refused: str = "") -> None:
        """Record the drafter in use, and a refused candidate."""
        new = ServerState(in_use, self.states[learner].refused + ((refused,) if refused else ()))
        new.write(self.folder / learner)
        self.states[learner] = new

    def _sum(self, surveys: list[Survey]) -> None:
        """Sum the numbers of all owners; a single owner's are not shown."""
        numbers = [survey.numbers for survey in surveys if survey.numbers]
        totals: dict[str, Any] = {name: sum(each[name] for each in numbers) for name in SUMMED}
        for name in MEANS:
            known = [each[name] for each in numbers if each.get(name)]
            totals[name] = sum(known) / len(known) if known else None
        latest = max(numbers, key=lambda each: each["at"], default={"phase": "waiting"})
        process_file = self.folder / "learner.json"  # of the process: why it failed
        failure = json.loads(process_file.read_text()) if process_file.is_file() else {}
        failed = failure.get("phase") == "failed" and not self.process.running
        shown = {"phase": "failed", "error": failure["error"]} if failed else {"phase": latest["phase"], "error": ""}
        self.numbers = totals | shown
        self._show_numbers(self._learned)

    @property
    def _learned(self) -> int:
        return sum(1 for state in self.states.values() if state.in_use)

    def snapshot(self) -> dict[str, Any]:
        """Return the page's data: sums, and the number of learned drafters; no owner's promotions."""
        return super().snapshot() | {"in_use": None, "learned": self._learned, "exchanges": []}


@dataclass
class KeyLearning(OwnerLearning):
    """Learning of all API keys that allow it. Removing a key deletes its drafters and answers."""

    access: Access = field(kw_only=True)

    def owners(self) -> dict[str, Owner]:
        owners = [Owner(key.name) for key in self.access.keys if key.learn]
        return {owner.learner: owner for owner in owners}

    def drafter_of(self, key: Key | None, model: str) -> OwnDrafter:
        if key is None:
            return OwnDrafter()
        learner = Owner(key.name).learner
        return OwnDrafter(learner, self._in_use(learner) if key.learn else "", secret=key.digest.hex())

    async def _leave(self, known: dict[str, Owner]) -> None:
        for folder in owners.learners(self.folder, KEYS):
            learner = f"{KEYS}/{folder.name}"
            if learner not in known:
                logger.warning("the learner of %s is deleted", owners.owner_of(folder) or f"key {folder.name}")
                await asyncio.to_thread(owners.forget_owner, folder)
                await self._drop(learner)


@dataclass
class AdapterLearning(OwnerLearning):
    """Learning of the model and of all loaded adapters. An unloaded adapter's drafters stay on the disk for its next
    load."""

    adapters: Adapters = field(kw_only=True)

    def owners(self) -> dict[str, Owner]:
        loaded = [owner for _, owner in self.adapters.owners.values()]
        return {MODEL: Owner("")} | {owner.learner: owner for owner in loaded}

    def drafter_of(self, key: Key | None, model: str) -> OwnDrafter:
        if (adapter_owner := self.adapters.owners.get(model)) is None:
            return OwnDrafter(MODEL, self._in_use(MODEL))
        adapter, owner = adapter_owner
        return OwnDrafter(owner.learner, self._in_use(owner.learner), adapter)

    async def _leave(self, known: dict[str, Owner]) -> None:
        for learner in self.states.keys() - known.keys():
            await self._drop(learner)
