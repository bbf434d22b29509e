"""Breakdown of step times: the lines that `plugin/hooks/step_profiler.py` wrote, as a table."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..plugin.hooks.step_profiler import PARTS

Kind = tuple[int, int, bool]
"""Requests, tokens of all together, and whether it is a prefill."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Times of the steps of one kind. parts: median milliseconds by part; total: median of their sums."""

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


def report(breakdowns: Mapping[Kind, Breakdown], wanted: Mapping[str, Kind], helpers: Mapping[str, float]) -> None:
    """Print a table in Markdown.

    wanted: the kinds to show by name. helpers: milliseconds per step of the processes beside the scheduler's.
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
