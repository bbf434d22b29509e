"""Results of a soak: its faults, a table, and memory over time."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from soak_traffic import SoakCounts

from outrider.server.bench.server_processes import ProcessSample

LOW = 10
"""Percentile of memory over a tenth of the time that counts as held. Memory above it is a step's workspace: logits of a
batch and their sorted copies are hundreds of MB that come and go between two samples."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Anonymous memory of one process, MB; pages of files come and go with the machine's free memory.

    first, warm, last: held at first, after the warm-up and at the end, see LOW. largest: of any sample after the
    warm-up. resident: at the end, with pages of files.
    """

    first: float
    warm: float
    last: float
    largest: float
    resident: float

    @property
    def after_warm_up(self) -> float:
        return self.last - self.warm


@dataclass(frozen=True, slots=True)
class Soak:
    """seconds: under load. warm_up: the part of them before memory counts. most_growth: MB. may_not_change: greedy
    answers.

    emptied: seconds until the cache was empty; None: never. held: cache usage at the end, by the server's gauges, if
    any.
    """

    counts: SoakCounts
    samples: Sequence[ProcessSample]
    seconds: float
    warm_up: float
    most_growth: float
    may_not_change: bool
    emptied: float | None
    held: dict[str, float]

    def growth(self) -> dict[str, Growth]:
        """Growth of each process that lived from the warm-up to the end."""
        warm = [sample for sample in self.samples if sample.seconds >= self.warm_up]
        if len(warm) < 4:
            return {}
        found = {}
        for name in warm[0].anonymous:
            kept = [sample for sample in warm if name in sample.anonymous]
            if kept[-1] is not warm[-1]:
                continue
            memory = [sample.anonymous[name] for sample in kept]
            few = max(1, len(memory) // 10)
            found[name] = Growth(
                first=self.samples[0].anonymous.get(name, 0.0),
                warm=float(np.percentile(memory[:few], LOW)),
                last=float(np.percentile(memory[-few:], LOW)),
                largest=max(memory),
                resident=kept[-1].resident[name],
            )
        return found

    def plain(self) -> dict[str, Any]:
        """All results for JSON."""
        counts = {field.name: getattr(self.counts, field.name) for field in fields(self.counts)}
        return {
            "faults": self.faults(),
            "seconds": self.seconds,
            "warm_up": self.warm_up,
            "counts": {name: dict(value) if isinstance(value, Counter) else value for name, value in counts.items()},
            "emptied": self.emptied,
            "held": self.held,
            "growth": {name: asdict(growth) for name, growth in self.growth().items()},
            "samples": [asdict(sample) for sample in self.samples],
        }

    def faults(self) -> list[str]:
        """All faults of the run."""
        counts, found = self.counts, []
        if counts.broken:
            found.append(f"{counts.broken} requests failed")
        if counts.changed and self.may_not_change:
            found.append(f"{counts.changed} greedy answers are not what they were alone")
        if counts.against_schema:
            found.append(f"{counts.against_schema} answers do not follow their schema")
        if self.emptied is None:
            found.append("the cache did not become empty")
        grown = sum(growth.after_warm_up for growth in self.growth().values())
        if grown > self.most_growth:
            found.append(f"memory grew by {grown:.0f} MB after the warm-up; {self.most_growth:g} are allowed")
        return found

    def table(self) -> str:
        counts = self.counts
        asked = ", ".join(f"{kind} {counts.whole[kind]} of {number}" for kind, number in counts.asked.items())
        failures = ", ".join(f"{failure}: {number}" for failure, number in counts.failures.items()) or "none"
        lines = [
            f"{sum(counts.asked.values())} requests in {self.seconds / 60:.1f} minutes; whole answers: {asked}",
            f"failures: {failures}",
            f"greedy answers compared with the same prompt alone: {counts.compared}, changed: {counts.changed}",
            f"answers against their schema: {counts.against_schema}",
            self._cache_line(),
        ]
        if growth := self.growth():
            lines.append(f"{'memory, MB':>16} {'first':>8} {'warm':>8} {'last':>8} {'largest':>8} {'resident':>8}")
            lines += [
                f"{name:>16} {g.first:8.1f} {g.warm:8.1f} {g.last:8.1f} {g.largest:8.1f} {g.resident:8.1f}"
                for name, g in growth.items()
            ]
        lines += [f"  {example}" for example in counts.examples]
        lines.append("; ".join(self.faults()) or "nothing found")
        return "\n".join(lines)

    def _cache_line(self) -> str:
        held = ", ".join(f"{name} {value:g}" for name, value in self.held.items())
        if self.emptied is None:
            return f"the cache is not empty: {held}"
        return f"cache empty after {self.emptied:.0f} s" if held else "the server does not say what its cache holds"
