"""What a check measured, kept in a file from step to step, and shown as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.storage.replacing import replace

from ..errors import UserError


@dataclass(frozen=True, slots=True)
class Measured:
    """One number. what: of what. unit: of the value. at_most, at_least: what it should be; None: nothing is asked."""

    what: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def good(self) -> bool | None:
        """None where nothing is asked of it; what is no number is not good."""
        if self.at_most is None and self.at_least is None:
            return None
        high = self.at_most is None or self.value <= self.at_most
        return high and (self.at_least is None or self.value >= self.at_least)

    @property
    def wanted(self) -> str:
        limits = (("≤", self.at_most), ("≥", self.at_least))
        return " ".join(f"{sign} {limit:.4g}" for sign, limit in limits if limit is not None)

    @property
    def verdict(self) -> str:
        return {None: "", True: "good", False: "NOT GOOD"}[self.good]


class Report:
    """The steps of a part that were done, each in the file as soon as it is.

    about: machine and versions, which a report that goes on must share.
    """

    def __init__(self, path: Path, about: dict[str, Any]):
        self.path, self.about = path, about
        self.steps: dict[str, dict[str, Any]] = {}
        self.missing: dict[str, list[dict[str, Any]]] = {}

    def resume(self) -> None:
        """Take up what the file has, if there is one. Raises UserError where it is of another machine or damaged."""
        if not self.path.exists():
            return
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            about, self.steps = found["about"], found["steps"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{self.path} is damaged: remove it, or leave --resume out") from None
        differ = [key for key in {*about, *self.about} if about.get(key) != self.about.get(key)]
        if differ:
            raise UserError(
                f"{self.path} is of another machine or other versions ({', '.join(sorted(differ))}): "
                "remove it, or leave --resume out"
            )

    def add(self, step: str, seconds: float, measured: Iterable[Measured], error: str = "") -> None:
        """Write the step down; error: what ended it early."""
        self.steps[step] = {"seconds": round(seconds, 1), "measured": _plain(measured), "error": error}
        self.missing.pop(step, None)
        self._write()

    def not_reached(self, steps: Iterable[str], measured: Iterable[Measured] = ()) -> None:
        """Write down that the time was up before these steps or, with what was measured of it, before a step's end."""
        self.missing |= {step: _plain(measured) for step in steps}
        self._write()

    def _write(self) -> None:
        content = {"about": self.about, "steps": self.steps, "not_reached": self.missing}
        replace({self.path: json.dumps(content, indent=1) + "\n"})

    @property
    def faults(self) -> list[str]:
        """Steps that failed, and what was not good in the others."""
        found = []
        for name, step in self.steps.items():
            found += [f"{name}: {step['error']}"] if step["error"] else []
            found += _bad(name, step["measured"])
        return found + [fault for name, measured in self.missing.items() for fault in _bad(name, measured)]

    def table(self) -> str:
        """Markdown."""
        lines = ["| step | what | measured | wanted | |", "|---|---|---|---|---|"]
        for name, step in self.steps.items():
            lines += _rows(name, step["measured"])
            if step["error"]:
                lines.append(f"| {name} | {step['error'].replace('|', '/')} | | | FAILED |")
        for name, measured in self.missing.items():
            lines += [*_rows(name, measured), f"| {name} | | | | not reached |"]
        return "\n".join(lines)


def _plain(measured: Iterable[Measured]) -> list[dict[str, Any]]:
    return [asdict(one) | {"good": one.good} for one in measured]


def _bad(step: str, measured: Iterable[dict[str, Any]]) -> list[str]:
    return [f"{step}: {one['what']}" for one in measured if one["good"] is False]


def _rows(step: str, measured: Iterable[dict[str, Any]]) -> Iterator[str]:
    for one in measured:
        made = Measured(**{key: value for key, value in one.items() if key != "good"})
        cells = step, made.what, f"{made.value:.4g} {made.unit}".rstrip(), made.wanted, made.verdict
        yield f"| {' | '.join(cells)} |"
