"""Outcomes of drafts for the requests of each LoRA adapter: counts, and a calibration of its own.

Acceptance differs between adapters, so each gets a calibration fitted to its own outcomes. Until the first fit the
drafter's calibration applies. A new version of a drafter starts without outcomes.
"""

from dataclasses import dataclass
from itertools import count
from typing import Any, Self

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry, Counter

from outrider.scheduler.calibration.classes import CLASSES
from outrider.scheduler.calibration.fit import fit_joint
from outrider.scheduler.calibration.records import Recorder
from outrider.scheduler.calibration.table import CalibrationTable

from ...options import RequestOptions
from ..buffered import BufferedCounter, BufferedMetrics
from ..step import StepDrafts
from .part import OptionalPart

FIRST = 128
"""Drafted blocks of a class after which it is first fitted; the next fit comes after twice as many, and so on."""
KEPT = 512
"""Drafted blocks of an adapter that are kept. A fit stops decoding for some 30 ms."""
OFTEN = 1 << 14
"""Most drafted blocks between two fits."""
BASE = 0
"""Number of the model without an adapter."""


@dataclass(slots=True)
class _Adapter:
    recorder: Recorder
    counters: dict[str, BufferedCounter]
    fit_at: int = FIRST
    table: CalibrationTable | None = None


class AdapterOutcomes(BufferedMetrics, OptionalPart):
    """Numbers the pairs of adapter and drafter, and keeps the outcomes of their drafts.

    loaded: SGLang's `LoRARef` of each loaded adapter, by its id. gamma: draft tokens per step, at most.
    """

    part = column = "adapters"

    def __init__(self, loaded: dict[str, Any], gamma: int, registry: CollectorRegistry = REGISTRY):
        super().__init__(registry)
        self.loaded, self.gamma = loaded, gamma
        self._numbers: dict[tuple[str, str], int] = {}  # by the adapter's id and its drafter's name
        self._next = count(BASE + 1)  # numbers are never reused: rows of ended requests may still hold them
        self._adapters: dict[int, _Adapter] = {}
        self._counted = {
            name: Counter(f"outrider_adapter_{name}_tokens", text, ["adapter"], registry=registry)
            for name, text in {
                "drafted": "Tokens proposed by the drafter for requests of a LoRA adapter.",
                "verified": "Drafted tokens that the target verified for them.",
                "accepted": "Drafted tokens that were accepted for them.",
            }.items()
        }

    @classmethod
    def of(cls, runner: Any, gamma: int) -> Self | None:
        """Return the outcomes for a server with adapters, None for any other. runner: SGLang's model runner."""
        return None if runner.lora_manager is None else cls(runner.lora_manager.lora_refs, gamma)

    def admitted(self, req: Any) -> int:
        if req.lora_id is None:
            return BASE
        options = RequestOptions.from_custom_params(req.sampling_params.custom_params)
        known = req.lora_id, options.own_drafter(req.lora_id)[1]
        if known not in self._numbers:
            self.flush()
            for gone in [each for each in self._numbers if each[0] not in self.loaded]:
                unloaded = self._adapters.pop(self._numbers.pop(gone)).counters.values()
                self.buffered = [each for each in self.buffered if each not in unloaded]
            self._numbers[known] = number = next(self._next)
            name = self.loaded[req.lora_id].lora_name
            counters = {kind: self.add(each.labels(name)) for kind, each in self._counted.items()}
            self._adapters[number] = _Adapter(Recorder(KEPT, self.gamma), counters)
        return self._numbers[known]

    def table(self, number: int) -> CalibrationTable | None:
        """Return an adapter's own calibration; None before its first fit, and for the model."""
        adapter = self._adapters.get(number)
        return None if adapter is None else adapter.table

    def drafted(self, drafts: StepDrafts) -> None:
        numbers = drafts.numbers(self.column)
        if numbers is None:
            return
        for number in np.unique(numbers[numbers != BASE]).tolist():
            adapter, mine = self._adapters.get(number), numbers == number
            if adapter is None:  # unloaded
                continue
            accepted = drafts.accept_lens - 1
            amounts = {"drafted": drafts.draft_lens, "verified": drafts.verify_lens, "accepted": accepted}
            for kind, amount in amounts.items():
                adapter.counters[kind].inc(float(amount[mine].sum()))
            if not (rows := mine & drafts.tells).any():
                continue
            adapter.recorder.record(drafts.raw[rows], drafts.verify_lens[rows], accepted[rows], drafts.classes[rows])
            if adapter.recorder.total >= adapter.fit_at:
                adapter.fit_at += min(adapter.fit_at, OFTEN)
                adapter.table = _fitted(adapter.recorder, drafts.calibration)
        self.flush_if_due()


def _fitted(recorder: Recorder, otherwise: CalibrationTable | None) -> CalibrationTable:
    """Fit the classes that have enough outcomes; take the rest from `otherwise`."""
    records, tables = recorder.records(), {}
    for place, case in enumerate(CLASSES):
        outcomes = records.select(records.classes == place)
        if len(outcomes) >= FIRST:
            tables[case] = fit_joint(outcomes)
        elif otherwise is not None:
            tables[case] = otherwise.by_class[place].of_length(records.gamma)
    return CalibrationTable.of(tables, records.gamma)
