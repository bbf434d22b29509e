"""The interface of optional parts, which follow requests and their drafts.

`OptionalParts` calls them through the boundary: a part that fails costs speed, never an answer.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from outrider.scheduler.calibration.table import CalibrationTable

from ..boundary import Boundary

if TYPE_CHECKING:
    from ..requests import Entries, RequestTable
    from ..step import Admission, StepDrafts


class OptionalPart:
    """An optional part. A subclass defines the methods that it needs.

    part: its name in `boundary.PARTS`. column: of the request table, keeps its number of each request.
    """

    part: ClassVar[str]
    column: ClassVar[str] = ""

    def admitted(self, req: Any) -> int:
        """A chunk of a request's prompt, or of its text after a retraction, is read. Return its number; 0: none."""
        return 0

    def begins(self) -> None:
        """A decode step begins."""

    def sent(self, result: Any, numbers: np.ndarray, admission: Admission | None, accept_lens: Any) -> None:
        """A result goes to SGLang. numbers: [R]. admission: None: each request has one token, from the target."""

    def drafted(self, drafts: StepDrafts) -> None:
        """The host has read the outcome of a step, which may have ended 16 steps ago."""

    def finished(self, req: Any) -> None:
        """A request has ended, or was aborted."""

    def table(self, number: int) -> CalibrationTable | None:
        """Return the calibration of drafts for requests of this number; None: the common one."""
        return None

    def flush(self) -> None:
        """Bring metrics up to date."""

    def save(self) -> None:
        """Write changes to the disk."""


class OptionalParts:
    """The parts of a server."""

    def __init__(self, optional: Boundary, parts: Sequence[OptionalPart | None]):
        self.optional = optional
        methods = [name for name in vars(OptionalPart) if not name.startswith("_")]
        self._with = {
            name: [part for part in parts if part and getattr(type(part), name) is not getattr(OptionalPart, name)]
            for name in methods
        }
        self._running: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    def admitted(self, table: RequestTable, rows: Sequence[int], reqs: Sequence[Any]) -> None:
        """Call `OptionalPart.admitted` for each request, and write the numbers to their rows."""
        for row, req in zip(rows, reqs, strict=True):
            if self._with["finished"]:
                self._running[req.rid] = req
            for part in self._with["admitted"]:
                number = self.optional.run(part.part, 0, part.admitted, req)
                if part.column:
                    table.numbers[part.column][row] = number

    def begins(self) -> None:
        for part in self._with["begins"]:
            self.optional.run(part.part, None, part.begins)

    def sent(self, result: Any, table: RequestTable, rows: np.ndarray, *outcome: Any) -> None:
        """Call `OptionalPart.sent` with the numbers of the requests in `rows` [R]."""
        for part in self._with["sent"]:
            self.optional.run(part.part, None, part.sent, result, table.numbers[part.column][rows], *outcome)

    def drafted(self, drafts: StepDrafts) -> None:
        for part in self._with["drafted"]:
            self.optional.run(part.part, None, part.drafted, drafts)

    def finished(self, rid: str) -> None:
        """Call `OptionalPart.finished`, if the request was admitted."""
        if (req := self._running.pop(rid, None)) is not None:
            for part in self._with["finished"]:
                self.optional.run(part.part, None, part.finished, req)

    def tables(self, entries: Entries, common: CalibrationTable | None, gamma: int) -> list[CalibrationTable] | None:
        """Return each request's calibration; None if all have `common` (None: uncalibrated)."""
        tables = None
        for part in self._with["table"]:
            if (numbers := entries.numbers.get(part.column)) is not None:
                tables = tables or [common or CalibrationTable.of({}, gamma)] * len(numbers)
                tables = [part.table(number) or table for number, table in zip(numbers.tolist(), tables, strict=True)]
        return tables

    def flush(self) -> None:
        for part in self._with["flush"]:
            self.optional.run(part.part, None, part.flush)

    def save(self) -> None:
        for part in self._with["save"]:
            part.save()
