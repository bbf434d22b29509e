"""Results of a soak: its faults, a table, and memory over time."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from soak_attacks import Attacked
from soak_traffic import SoakCounts

from outrider.server.bench.server_processes import ProcessSample

LOW = 10
"""Percentile of memory over a tenth of the time that counts as held. Above it is what a step works with: the logits
of a batch, and their sorted copies where requests sample, are hundreds of MB that come and go between two samples."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Anonymous memory of one process, MB; files' pages come and go as the machine has room.

    first, warm, last: held at first, when the warm-up ended and at the end, see LOW. largest: of any sample after the
    warm-up. resident: at the end, with files' pages.
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
    """seconds: under load. warm_up: of them. most_growth: MB after it. may_not_change: greedy answers.

    emptied: seconds until the cache was empty; None: never. held: what requests hold at the end, by the server's
    gauges; empty where it has none. attacked: what became of attacks, None where there were none. most_slower: p99 of
    the others' waits beside attackers over that without.
    """

    counts: SoakCounts
    samples: Sequence[ProcessSample]
    seconds: float
    warm_up: float
    most_growth: float
    may_not_change: bool
    emptied: float | None
    held: dict[str, float]
    attacked: Attacked | None = None
    most_slower: float = 1.5

    def waits(self) -> list[tuple[float, float]]:
        """Median and p99 of the others' waits, seconds: without attackers, and beside them."""
        return [tuple(np.percentile(waits, [50, 99]).tolist()) if waits else (0.0, 0.0) for waits in self.counts.waits]

    @property
    def slower(self) -> float:
        """p99 of the others' waits beside attackers over that without; 0 where either is not known."""
        (_, without), (_, beside) = self.waits()
        return beside / without if without else 0.0

    def growth(self) -> dict[str, Growth]:
        """Growth by process, of those that lived from the warm-up to the end."""
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
        """Everything, as JSON has it."""
        counts = {field.name: getattr(self.counts, field.name) for field in fields(self.counts)}
        return {
            "faults": self.faults(),
            "seconds": self.seconds,
            "warm_up": self.warm_up,
            "counts": {name: dict(value) if isinstance(value, Counter) else value for name, value in counts.items()},
            "attacked": self.attacked and self.attacked.plain(),
            "p50_p99_without_and_beside_attackers": self.waits(),
            "emptied": self.emptied,
            "held": self.held,
            "growth": {name: asdict(growth) for name, growth in self.growth().items()},
            "samples": [asdict(sample) for sample in self.samples],
        }

    def faults(self) -> list[str]:
        """Everything that must not happen, and did."""
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
        if self.attacked is not None:
            found += self.attacked.server_errors()
            if self.slower > self.most_slower:
                found.append(
                    f"p99 beside attackers is {self.slower:.2f} × that without; {self.most_slower:g} are allowed"
                )
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
            *self._attack_lines(),
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

    def _attack_lines(self) -> list[str]:
        if self.attacked is None:
            return []
        (median, last), (median_beside, last_beside) = self.waits()
        before, during = self.attacked.health
        lines = [
            f"others' waits, p50 and p99: {median:.2f} and {last:.2f} s without attackers, {median_beside:.2f} and"
            f" {last_beside:.2f} s beside them ({self.slower:.2f} × at p99)",
            f"slowest /health: {before:.3f} s without attackers, {during:.3f} s beside them",
            f"{'attack':>26} {'slowest, s':>10}  answers",
        ]
        for kind, outcomes in self.attacked.outcomes.items():
            answers = ", ".join(f"{name}: {number}" for name, number in outcomes.items())
            lines.append(f"{kind:>26} {self.attacked.slowest[kind]:10.2f}  {answers}")
        return lines

    def _cache_line(self) -> str:
        held = ", ".join(f"{name} {value:g}" for name, value in self.held.items())
        if self.emptied is None:
            return f"the cache is not empty: {held}"
        return f"cache empty after {self.emptied:.0f} s" if held else "the server does not say what its cache holds"
