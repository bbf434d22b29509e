"""Drafters that belong to an owner (an API key or an adapter): loads them and chooses the weights for each request.

A request names its owner and the owner's drafter in use (`RequestOptions`). It keeps this drafter to its end, so its
draft state comes from one set of weights. A promoted drafter serves later requests.
"""

import logging
import weakref
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Self

import numpy as np

from outrider.drafters.base import Drafter
from outrider.scheduler.calibration.table import CalibrationTable

from ...config import PluginConfig
from ...loading.from_profile import CALIBRATION, load_calibration
from ...options import RequestOptions
from ..step import StepDrafts
from .learning import DrafterWatch
from .part import OptionalPart

logger = logging.getLogger(__name__)

Own = tuple[str, str]
"""A learner and the name of its drafter; "": the drafter of the start."""


@dataclass
class _Owner:
    """An owner's latest drafter, compared with the previous one."""

    name: str
    watch: DrafterWatch = field(default_factory=DrafterWatch)


class OwnerDrafters(OptionalPart):
    """Loads drafters on demand, at most `most` at a time, and drops the least recently used first.

    Drafters of running requests stay. If there is no room, the weights of the start draft for a request.
    refused: drafters that did worse than the previous one or did not fit, as "learner/name".
    """

    part, column = "own_drafters", "sets"

    def __init__(self, folder: Path, most: int, drafter: Drafter):
        self.folder, self.most, self.drafter = folder, most, drafter
        self.refused: list[str] = []
        self._numbers: dict[Own, int] = {}
        self._owns: dict[int, Own] = {}
        self._next = count(1)  # numbers are never reused: rows of ended requests may still hold them
        self._loaded: dict[int, CalibrationTable | None] = {}  # the least recently used first
        self._owners: dict[str, _Owner] = {}
        self._running: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, config: PluginConfig, drafter: Drafter | None) -> Self | None:
        """Return the drafters of a server on which keys or adapters have their own; None on any other."""
        if not config.learn_keys or drafter is None:
            return None
        return cls(Path(config.learning), config.learn_keys, drafter)

    def admitted(self, req: Any) -> int:
        """Return the number of the weights that draft for a request; 0 without an owner."""
        own = _own(req)
        if not own[0]:
            return 0
        self._running[req.rid] = req
        return self._number(own)

    def finished(self, req: Any) -> None:
        self._running.pop(req.rid, None)

    def _number(self, own: Own) -> int:
        learner, name = own
        if own not in self._numbers:
            self._numbers[own] = next(self._next)
            self._owns[self._numbers[own]] = own
        owner = self._owners.setdefault(learner, _Owner(name))
        if name > owner.name:
            owner.name = name
            owner.watch.exchanged()
        elif name < owner.name and _shown(learner, owner.name) in self.refused:
            owner.name = name
            owner.watch.forget()
        if name and _shown(*own) not in self.refused:
            self._load(self._numbers[own])
        return self._numbers[own]

    def _load(self, number: int) -> None:
        """Load a drafter into memory if there is room."""
        if number in self._loaded:
            self._loaded[number] = self._loaded.pop(number)
            return
        learner, name = self._owns[number]
        busy = {self._numbers.get(_own(req)) for req in self._running.values()}
        idle = [n for n in self._loaded if n not in busy]
        for former in [n for n in idle if self._owns[n][0] == learner]:
            self._drop(former)
            idle.remove(former)
        if len(self._loaded) >= self.most:
            if not idle:
                return
            self._drop(idle[0])
        folder = self.folder / learner / "drafters" / name
        try:
            path = folder / CALIBRATION
            fitted = load_calibration(path, self.drafter.gamma) if path.is_file() else None
            self.drafter.reload(str(folder), number)
        except (ValueError, OSError) as error:
            logger.warning("the learned drafter %s is not used: %s", folder, error)
            self._refuse(number)
            return
        self._loaded[number] = fitted

    def _drop(self, number: int) -> None:
        if number in self._loaded:
            del self._loaded[number]
            self.drafter.drop(number)

    def _refuse(self, number: int) -> None:
        self._drop(number)
        learner, name = self._owns[number]
        self.refused.append(_shown(learner, name))
        self._owners[learner].watch.forget()

    def drop_owner(self, learner: str) -> None:
        """Forget an owner; its running requests continue with the weights of the start."""
        for own in [own for own in self._numbers if own[0] == learner]:
            self._drop(self._numbers[own])
            del self._owns[self._numbers.pop(own)]
        self._owners.pop(learner, None)
        self.refused = [each for each in self.refused if not each.startswith(f"{learner}/")]

    def table(self, number: int) -> CalibrationTable | None:
        """Return a set's own calibration; None if it has none."""
        return self._loaded.get(number)

    def drafted(self, drafts: StepDrafts) -> None:
        """Compare drafters of the same owner; take back drafters that do worse."""
        sets = drafts.numbers(self.column)
        if not drafts.drafted or sets is None:
            return
        for number in np.unique(sets).tolist():
            learner, name = self._owns.get(number, ("", ""))
            owner = self._owners.get(learner)
            if owner is None or name != owner.name or (name and number not in self._loaded):
                continue
            owner.watch.observe(*drafts.outcome(sets == number))
            if name and owner.watch.worse:
                logger.warning("an owner's learned drafter %s is taken back: fewer of its tokens were accepted", name)
                self._refuse(number)

    def state(self) -> dict[str, Any]:
        """Drafters in memory and refused, for another process."""
        return {"in_use": "", "loaded": len(self._loaded), "refused": list(self.refused)}


def _own(req: Any) -> Own:
    return RequestOptions.from_custom_params(req.sampling_params.custom_params).own_drafter(req.lora_id)


def _shown(learner: str, name: str) -> str:
    return f"{learner}/{name}"
