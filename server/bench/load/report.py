"""A load test's results as a table, as CSV with a row per request, and as a picture."""

from __future__ import annotations

import csv
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import pictures
from .. import harness
from .generate import Record
from .summary import Results, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    *("load", "arm", "round", "name", "warm_up", "due", "late", "ttft", "tpot", "e2e"),
    *("prompt_tokens", "completion_tokens", "finish_reason", "status", "failure", "detail"),
)
NOTHING = "–"
"""Shown if no answer was whole."""
LATE_SECONDS = 0.05
"""Delay of sending (p99) above which a warning is printed."""
OURS, ALSO_OURS = "planned", "no levels"
"""The arm compared with the best other arm, and an arm excluded from that comparison."""


def show(results: Results, unit: str, picture: Path | None) -> None:
    """Print the table; draw the picture if --plot was given."""
    print(table(results, unit))
    if any(len(one.ttft_by_prompt) > 1 for arms in results.values() for rounds in arms.values() for one in rounds):
        print(prompt_table(results, unit))
    if picture:
        with pictures.figure(picture) as figure:
            plot(results, unit, figure)


def named(results: Results) -> dict[str, dict[str, list[Summary]]]:
    """Results for JSON, with loads as strings."""
    return {f"{load:g}": arms for load, arms in results.items()}


def table(results: Results, unit: str) -> str:
    """A row per load and arm, medians over the rounds; ratios to the first arm are of the same round."""
    lines = [
        f"{unit:>9} {'arm':>16} {'whole/asked':>12} {'req/s':>6} {'tok/s':>7} {'per user':>8} {'TTFT p50':>9}"
        f" {'p90':>6} {'p99':>6} {'TPOT p50':>9} {'p99':>5} {'gap p99':>8} {'E2E p50':>8} {'p99':>6} {'good':>5}"
        f" {'goodput':>8} {'tau':>5}  failures, ratios"
    ]
    every = [one for arms in results.values() for rounds in arms.values() for one in rounds]
    for load, arms in results.items():
        lines += [
            f"{load:>9g} {arm:>16} {_columns(rounds)}  {_remarks(arm, arms)}" for arm, rounds in arms.items() if rounds
        ]
    if (late := max(one.late for one in every)) > LATE_SECONDS:
        lines.append(
            f"This client was up to {late * 1e3:.0f} ms late (p99): it needs more of a core, or fewer requests."
        )
    if compared := [one.differ for one in every if one.differ is not None]:
        lines.append(f"answers that differ between arms: {sum(compared)}")
    return "\n".join(lines)


def prompt_table(results: Results, unit: str) -> str:
    """A row per load and arm, medians over the rounds: gaps, tokens of prompts and answers, TTFT by prompt length."""
    every = [one for arms in results.values() for rounds in arms.values() for one in rounds]
    names = dict.fromkeys(name for one in every for name in one.ttft_by_prompt)
    lines = [
        f"{unit:>9} {'arm':>16} {'gap p50':>8} {'p99':>6} {'longest':>8} {'tok/s with prompts':>19}"
        + "".join(f" {f'TTFT p50, p99 {name}':>24}" for name in names)
    ]
    for load, arms in results.items():
        first_arm = next(iter(arms))
        for arm, rounds in arms.items():
            p50, p99, longest = (_times(rounds, "gap", name) for name in ("p50", "p99", "largest"))
            tokens = _cell(one.with_prompts for one in rounds)
            line = f"{load:>9g} {arm:>16} {p50:>8} {p99:>6} {longest:>5} ms {tokens:>19}"
            for name in names:
                first = [one.ttft_by_prompt[name] for one in rounds if name in one.ttft_by_prompt]
                line += f" {_cell((f.p50 for f in first), 2):>14} {_cell((f.p99 for f in first), 2):>7} s"
            compared = {
                "tok/s with prompts": ratio(rounds, arms[first_arm], lambda one: one.with_prompts),
                "longest gap": ratio(rounds, arms[first_arm], lambda one: one.gap.largest if one.gap else None),
            }
            if arm != first_arm:
                line += "".join(f"  {name} {found.cell} × {first_arm}" for name, found in compared.items() if found)
            lines.append(line)
    return "\n".join(lines)


def _cell(values: Iterable[float | None], digits: int = 0) -> str:
    """The median as text."""
    median = _median(values)
    return NOTHING if median is None else f"{median:.{digits}f}"


def _times(rounds: Sequence[Summary], name: str, percentile: str, digits: int = 0, scale: float = 1e3) -> str:
    """The median of a percentile of times as text, in milliseconds unless `scale` says otherwise."""
    spreads = [spread for one in rounds if (spread := getattr(one, name))]
    return _cell((getattr(spread, percentile) * scale for spread in spreads), digits)


def _columns(rounds: Sequence[Summary]) -> str:
    times = partial(_times, rounds)
    good = goodput = tau = ""
    if any(one.goodput is not None for one in rounds):
        good = _cell(one.good and one.good * 100 for one in rounds) + "%"
        goodput = _cell((one.goodput for one in rounds), 2) + "/s"
    if any(one.counts for one in rounds):
        tau = _cell((one.counts["tau"] if one.counts else None for one in rounds), 2)
    whole = f"{sum(one.whole for one in rounds)}/{sum(one.asked for one in rounds)}"
    rate = _cell((one.requests_per_second for one in rounds), 2)
    throughput, per_user = (_cell((getattr(one, n) for one in rounds), 1) for n in ("throughput", "per_user"))
    return (
        f"{whole:>12} {rate:>6} {throughput:>7} {per_user:>8} {times('ttft', 'p50'):>6} ms {times('ttft', 'p90'):>6}"
        f" {times('ttft', 'p99'):>6} {times('tpot', 'p50', 1):>6} ms {times('tpot', 'p99'):>5}"
        f" {times('gap', 'p99', 1):>8} {times('e2e', 'p50', 2, 1):>6} s {times('e2e', 'p99', 2, 1):>6} {good:>5}"
        f" {goodput:>8} {tau:>5}"
    )


def _remarks(arm: str, arms: Mapping[str, Sequence[Summary]]) -> str:
    failures = sum((Counter(one.failures) for one in arms[arm]), Counter[str]())
    said = [", ".join(f"{failure}: {count}" for failure, count in failures.items()) or "none"]
    if levels := [one.level_kept for one in arms[arm] if one.level_kept is not None]:
        said.append(f"level kept {statistics.median(levels):.0%}")
    first = next(iter(arms))
    if arm != first and (found := ratio(arms[arm], arms[first])):
        said.append(f"{found.cell} × {first}")
        for what, read in BESIDE.items():
            if also := ratio(arms[arm], arms[first], read):
                said.append(f"{what} {also.cell} ×")
    if arm == OURS and len(arms) > 2 and (best := best_of(arms, OURS)) and (found := ratio(arms[arm], arms[best])):
        said.append(f"{found.cell} × the better of the others, {best}")
    return "; ".join(said)


BESIDE: dict[str, Callable[[Summary], float | None]] = {
    "p99 gap": lambda one: one.gap.p99 if one.gap else None,
    "processor time a token": lambda one: one.processor_ms,
}
"""Ratios to the first arm shown with the ratio of throughputs."""


def ratio(
    ours: Sequence[Summary],
    theirs: Sequence[Summary],
    read: Callable[[Summary], float | None] = lambda one: one.throughput,
) -> harness.Ratio | None:
    """Ratio of two arms by `read(summary)`; None if an arm lacks a round's value or a divisor is not above 0."""
    found = [[value for one in rounds if (value := read(one)) is not None] for rounds in (ours, theirs)]
    if len(found[0]) != len(found[1]) or not found[1] or min(found[1]) <= 0:
        return None
    return harness.ratio(*found)


def best_of(arms: Mapping[str, Sequence[Summary]], but: str) -> str | None:
    """The arm with the highest median throughput, except `but` and ALSO_OURS; None without one."""
    rates = {
        arm: statistics.median(one.throughput for one in rounds)
        for arm, rounds in arms.items()
        if rounds and arm not in (but, ALSO_OURS)
    }
    return max(rates, key=lambda arm: rates[arm], default=None)


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def write_csv(path: Path, records: Mapping[tuple[float, str, int], Sequence[Record]], warm_up: float) -> None:
    """Write a row per request, warm-up marked; times in seconds. records: by load, arm and round."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for (load, arm, number), found in records.items():
            for record in sorted(found, key=lambda record: record.due):
                writer.writerow({"load": load, "arm": arm, "round": number, **_row(record, warm_up)})


def _row(record: Record, warm_up: float) -> dict[str, Any]:
    reply = record.reply
    times = {"due": record.due, "late": record.late, "ttft": record.ttft, "tpot": reply.tpot, "e2e": record.e2e}
    return {
        "name": record.name,
        "warm_up": int(record.due < warm_up),
        **{name: f"{seconds:.6f}" for name, seconds in times.items()},
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "finish_reason": reply.finish_reason,
        "status": reply.status or "",
        "failure": reply.failure,
        "detail": reply.detail,
    }


def plot(results: Results, unit: str, figure: Figure) -> None:
    """Draw throughput over speed per user, and times to the first token and per token over load; a line per arm."""
    figure.set_size_inches(10, 4)
    curve, times = figure.subplots(1, 2)
    for arm in dict.fromkeys(arm for arms in results.values() for arm in arms):
        found = {load: arms[arm] for load, arms in results.items() if arms.get(arm)}
        points = [
            (speed, statistics.median(one.throughput for one in rounds), load)
            for load, rounds in found.items()
            if (speed := _median(one.per_user for one in rounds))
        ]
        (line,) = curve.plot([speed for speed, _, _ in points], [rate for _, rate, _ in points], "o-", label=arm)
        for speed, rate, load in points:
            curve.annotate(f"{load:g}", (speed, rate), textcoords="offset points", xytext=(4, 4), fontsize=7)
        for name, style in (("ttft", "o-"), ("tpot", "o--")):
            spreads = {load: [getattr(one, name) for one in rounds] for load, rounds in found.items()}
            medians = {load: _median(one and one.p50 * 1e3 for one in every) for load, every in spreads.items()}
            ms = {load: median for load, median in medians.items() if median is not None}
            if ms:
                label = f"{arm} {name.upper()} p50".strip()
                times.plot(list(ms), list(ms.values()), style, color=line.get_color(), label=label)
                times.set_yscale("log")
    curve.set(xlabel="tokens/s per user (median)", ylabel="tokens/s, all requests")
    curve.set_title(f"at each point: {unit}", fontsize=9)
    curve.legend(fontsize=7)
    times.set(xlabel=unit, ylabel="ms")
    if times.lines:
        times.legend(fontsize=7)
