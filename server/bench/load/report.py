"""A load test's results as a table, as one CSV row per request, and as a picture."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.server.bench.load.generate import Record
from outrider.server.bench.load.summary import Spread, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    *("load", "name", "warm_up", "due", "late", "ttft", "tpot", "e2e", "longest_gap", "prompt_tokens"),
    *("completion_tokens", "finish_reason", "status", "failure", "detail"),
)
LATE_SECONDS = 0.05
"""Requests sent later than this are worth a word."""


def table(summaries: Sequence[Summary], unit: str) -> str:
    """A row per load."""
    lines = [
        f"{unit:>9} {'whole/asked':>12} {'req/s':>6} {'tok/s':>7} {'per user':>8} {'TTFT p50':>9} {'p90':>6} {'p99':>6}"
        f" {'TPOT p50':>9} {'p99':>5} {'E2E p50':>8} {'p99':>6} {'good':>5} {'goodput':>8}  failures"
    ]
    for s in summaries:
        failures = ", ".join(f"{failure}: {count}" for failure, count in s.failures.items())
        good = f"{'':>5} {'':>8}"
        if s.goodput is not None:
            good = f"{s.good or 0:5.0%} {s.goodput:6.2f}/s"
        lines.append(
            f"{s.load:>9g} {f'{s.whole}/{s.asked}':>12} {s.requests_per_second:6.2f} {s.throughput:7.1f}"
            f" {s.per_user:8.1f} {s.ttft.p50 * 1e3:6.0f} ms {s.ttft.p90 * 1e3:6.0f} {s.ttft.p99 * 1e3:6.0f}"
            f" {s.tpot.p50 * 1e3:6.1f} ms {s.tpot.p99 * 1e3:5.0f} {s.e2e.p50:6.2f} s {s.e2e.p99:6.2f} {good}"
            f"  {failures or 'none'}"
        )
    if (late := max(s.late for s in summaries)) > LATE_SECONDS:
        lines.append(
            f"This client was up to {late * 1e3:.0f} ms late (p99): it needs more of a core, or fewer requests."
        )
    return "\n".join(lines)


def write_csv(path: Path, records: Mapping[float, Sequence[Record]], warm_up: float) -> None:
    """A row per request, those of the warm-up marked; times in seconds."""
    rows = [
        _row(load, record, warm_up)
        for load, of_load in records.items()
        for record in sorted(of_load, key=lambda record: record.due)
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def _row(load: float, record: Record, warm_up: float) -> dict[str, Any]:
    reply = record.reply
    times = {"due": record.due, "late": record.late, "ttft": record.ttft, "tpot": reply.tpot, "e2e": record.e2e}
    return {
        "load": load,
        "name": record.name,
        "warm_up": int(record.due < warm_up),
        **{name: f"{seconds:.6f}" for name, seconds in (times | {"longest_gap": reply.longest_gap}).items()},
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "finish_reason": reply.finish_reason,
        "status": reply.status or "",
        "failure": reply.failure,
        "detail": reply.detail,
    }


def plot(summaries: Sequence[Summary], unit: str, figure: Figure) -> None:
    """Draw throughput over speed per user, and times over load."""
    figure.set_size_inches(10, 4)
    curve, times = figure.subplots(1, 2)
    speeds, rates = [s.per_user for s in summaries], [s.throughput for s in summaries]
    curve.plot(speeds, rates, "o-")
    for s in summaries:
        curve.annotate(f"{s.load:g}", (s.per_user, s.throughput), textcoords="offset points", xytext=(4, 4), fontsize=7)
    curve.set_xlabel("tokens/s per user (median)")
    curve.set_ylabel("tokens/s, all requests")
    curve.set_title(f"by {unit}", fontsize=9)
    loads = [s.load for s in summaries]
    for name, spreads in _spreads(summaries).items():
        (line,) = times.plot(loads, [spread.p50 * 1e3 for spread in spreads], "o-", label=f"{name} p50")
        times.plot(loads, [s.p99 * 1e3 for s in spreads], "o--", color=line.get_color(), label=f"{name} p99")
    times.set_xlabel(unit)
    times.set_ylabel("ms")
    times.set_yscale("log")
    times.legend(fontsize=7)


def _spreads(summaries: Sequence[Summary]) -> dict[str, list[Spread]]:
    return {"TTFT": [s.ttft for s in summaries], "TPOT": [s.tpot for s in summaries], "E2E": [s.e2e for s in summaries]}
