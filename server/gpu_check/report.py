"""What a check measured, kept in a file from step to step, and shown as a table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.server.errors import UserError


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
        listed = [asdict(one) | {"good": one.good} for one in measured]
        self.steps[step] = {"seconds": round(seconds, 1), "measured": listed, "error": error}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"about": self.about, "steps": self.steps}, indent=1) + "\n", encoding="utf-8")
        os.replace(new, self.path)

    @property
    def faults(self) -> list[str]:
        """Steps that failed, and what was not good in the others."""
        found = []
        for name, step in self.steps.items():
            found += [f"{name}: {step['error']}"] if step["error"] else []
            found += [f"{name}: {one['what']}" for one in step["measured"] if one["good"] is False]
        return found

    def table(self) -> str:
        """Markdown."""
        lines = ["| step | what | measured | wanted | |", "|---|---|---|---|---|"]
        for name, step in self.steps.items():
            for one in step["measured"]:
                made = Measured(**{key: value for key, value in one.items() if key != "good"})
                cells = name, made.what, f"{made.value:.4g} {made.unit}".rstrip(), made.wanted, made.verdict
                lines.append(f"| {' | '.join(cells)} |")
            if step["error"]:
                lines.append(f"| {name} | {step['error'].replace('|', '/')} | | | FAILED |")
        return "\n".join(lines)
