"""Where the time of a step goes: the lines that `plugin/hooks/step_profiler.py` wrote, as a table."""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ..plugin.hooks.step_profiler import PARTS

if TYPE_CHECKING:
    from ..processes.engine import Engine

Kind = tuple[int, int, bool]
"""Requests, tokens of all together, and whether it is a prefill."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Of the steps of one kind. parts: median milliseconds by part; total: median of their sums."""

    steps: int
    total: float
    parts: Mapping[str, float]


def read(path: Path) -> dict[Kind, Breakdown]:
    """The log's steps by kind; the first of several warms up and is left out."""
    found: dict[Kind, list[dict[str, float]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        step: dict[str, Any] = json.loads(line)
        found[step["requests"], step["tokens"], step["prefill"]].append(step["seconds"])
    return {kind: summarise(steps[1:] or steps) for kind, steps in found.items()}


def summarise(steps: list[dict[str, float]]) -> Breakdown:
    def median(values: Iterable[float]) -> float:
        return statistics.median(values) * 1e3

    parts = {part: median(step.get(part, 0.0) for step in steps) for part in PARTS}
    return Breakdown(len(steps), median(sum(step.values()) for step in steps), parts)


class HelperTime:
    """Processor time per step, by shape, of the processes beside the scheduler's: HTTP and detokenizer."""

    def __init__(self) -> None:
        self._processes: list[psutil.Process] = []
        self._seconds: dict[str, float] = defaultdict(float)
        self._steps: dict[str, int] = defaultdict(int)
        self._shape = ""

    def watch(self, engine: Engine) -> None:
        helpers = [process.pid for name, process in engine.processes.items() if not name.startswith("scheduler")]
        self._processes = [psutil.Process(pid) for pid in (os.getpid(), *helpers)]

    @contextmanager
    def during(self, shape: str) -> Iterator[None]:
        self._shape = shape
        before = self._used()
        yield
        self._seconds[shape] += self._used() - before

    def count(self, steps: int) -> None:
        """So many took place meanwhile."""
        self._steps[self._shape] += steps

    def per_step(self) -> dict[str, float]:
        """Milliseconds by shape."""
        return {shape: seconds * 1e3 / max(1, self._steps[shape]) for shape, seconds in self._seconds.items()}

    def _used(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)


def report(breakdowns: Mapping[Kind, Breakdown], wanted: Mapping[str, Kind], helpers: Mapping[str, float]) -> None:
    """Print a table in Markdown.

    wanted: the kinds to show by name. helpers: milliseconds per step of `HelperTime`.
    """
    print(f"\n| ms of a step | {' | '.join(PARTS)} | sum | beside it, HTTP and detokenizer |")
    print("|---" * (len(PARTS) + 3) + "|")
    for name, kind in wanted.items():
        if kind not in breakdowns:
            continue
        found = breakdowns[kind]
        cells = [f"{found.parts[part]:.2f}" for part in PARTS]
        beside = f"{helpers[name]:.1f}" if name in helpers else "–"
        print(f"| {name} | {' | '.join(cells)} | {found.total:.1f} | {beside} |")
