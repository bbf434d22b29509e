"""A load test's results as a table, as one CSV row per request, and as a picture."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .generate import Record
from .summary import Spread, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    *("load", "name", "warm_up", "due", "late", "ttft", "tpot", "e2e", "longest_gap", "prompt_tokens"),
    *("completion_tokens", "finish_reason", "status", "failure", "detail"),
)
NOTHING = "–"
"""Where no answer was whole."""
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
            good = f"{NOTHING:>5}" if s.good is None else f"{s.good:5.0%}"
            good += f" {s.goodput:6.2f}/s"
        ttft, tpot, e2e = _times(s.ttft, 1e3), _times(s.tpot, 1e3), _times(s.e2e, 1)
        lines.append(
            f"{s.load:>9g} {f'{s.whole}/{s.asked}':>12} {s.requests_per_second:6.2f} {s.throughput:7.1f}"
            f" {_cell(s.per_user, 8, 1)} {_cell(ttft.get('p50'), 6)} ms {_cell(ttft.get('p90'), 6)}"
            f" {_cell(ttft.get('p99'), 6)} {_cell(tpot.get('p50'), 6, 1)} ms {_cell(tpot.get('p99'), 5)}"
            f" {_cell(e2e.get('p50'), 6, 2)} s {_cell(e2e.get('p99'), 6, 2)} {good}  {failures or 'none'}"
        )
    if (late := max(s.late for s in summaries)) > LATE_SECONDS:
        lines.append(
            f"This client was up to {late * 1e3:.0f} ms late (p99): it needs more of a core, or fewer requests."
        )
    return "\n".join(lines)


def _times(spread: Spread | None, per_second: float) -> dict[str, float]:
    """By name; empty where nothing was measured. per_second: 1000 for milliseconds."""
    return {} if spread is None else {name: per_second * seconds for name, seconds in asdict(spread).items()}


def _cell(value: float | None, width: int, digits: int = 0) -> str:
    return f"{NOTHING:>{width}}" if value is None else f"{value:{width}.{digits}f}"


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
    points = [(s.per_user, s.throughput, s.load) for s in summaries if s.per_user is not None]
    curve.plot([speed for speed, _, _ in points], [rate for _, rate, _ in points], "o-")
    for speed, rate, load in points:
        curve.annotate(f"{load:g}", (speed, rate), textcoords="offset points", xytext=(4, 4), fontsize=7)
    curve.set_xlabel("tokens/s per user (median)")
    curve.set_ylabel("tokens/s, all requests")
    curve.set_title(f"at each point: {unit}", fontsize=9)
    for name in ("ttft", "tpot", "e2e"):
        found = {s.load: ms for s in summaries if (ms := _times(getattr(s, name), 1e3))}
        if not found:
            continue
        (line,) = times.plot(list(found), [ms["p50"] for ms in found.values()], "o-", label=f"{name.upper()} p50")
        slow = [ms["p99"] for ms in found.values()]
        times.plot(list(found), slow, "o--", color=line.get_color(), label=f"{name.upper()} p99")
        times.set_yscale("log")
    times.set_xlabel(unit)
    times.set_ylabel("ms")
    if times.lines:
        times.legend(fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
