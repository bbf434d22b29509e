"""Pictures of a profile: its steps, its calibration, its draft graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from outrider.scheduler.calibration.classes import CLASSES
from outrider.scheduler.calibration.model import BINS, Calibration, quality
from outrider.scheduler.calibration.records import Records
from outrider.scheduler.calibration.table import CalibrationTable
from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.cost.step_times import level_contexts
from outrider.scheduler.draft_graphs.calibration import Counts
from outrider.scheduler.draft_graphs.graph import DraftGraph

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_steps_per_second(cost: StepCost, figure: Figure) -> None:
    """Draw SPS(B) for each measured number of requests.

    Dots were measured (bars: fastest and slowest repetition), lines are what the planner assumes in between. The
    smallest context is drawn, without drafting.
    """
    figure.set_size_inches(7, 4.5)
    axis = figure.subplots()
    shapes: dict[int, dict[int, tuple[float, tuple[float, ...]]]] = {}
    for point in level_contexts(cost.points):
        if point.tokens and not point.drafted:
            shapes.setdefault(point.requests, {}).setdefault(point.tokens, (point.context, point.seconds))
    for requests, measured in shapes.items():
        context = min(found for found, _ in measured.values())
        tokens = np.arange(min(measured), max(measured) + 1)
        [line] = axis.plot(tokens, cost.steps_per_second(requests, tokens, context), label=f"{requests}")
        rates = [np.quantile(1.0 / np.array(seconds), [0, 0.5, 1]) for _, seconds in measured.values()]
        low, middle, high = np.transpose(rates)
        bars = np.vstack([middle - low, high - middle])
        axis.errorbar(list(measured), middle, bars, fmt="o", markersize=4, capsize=2, color=line.get_color())
    axis.set_xscale("log", base=2)
    axis.set_xlabel("tokens verified in a step")
    axis.set_ylabel("steps per second")
    axis.set_ylim(bottom=0)
    axis.legend(title="requests")


def reliability(predicted: np.ndarray, outcome: np.ndarray, bins: int = BINS) -> tuple[np.ndarray, ...]:
    """Mean prediction, mean outcome and count of each of `bins` equal-width bins that holds any of N."""
    place = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    counts = np.bincount(place, minlength=bins)
    held = counts > 0
    means = [np.bincount(place, values, minlength=bins)[held] / counts[held] for values in (predicted, outcome)]
    return means[0], means[1], counts[held]


def plot_reliability(records: Records, table: CalibrationTable, figure: Figure) -> None:
    """Reliability diagram: predicted against observed prefix survival, before and after calibration (DSpark, figure 6).

    A row per class that has records, a panel per position.
    """
    parts = [records.select(records.classes == place) for place in range(len(CLASSES))]
    rows = [drawn for drawn in zip(CLASSES, table.by_class, parts, strict=True) if len(drawn[2])]
    gamma = records.gamma
    figure.set_size_inches(2.6 * gamma, 2.7 * len(rows) + 0.3)
    axes = figure.subplots(len(rows), gamma, sharex=True, sharey=True, squeeze=False)
    for row, (case, calibration, part) in zip(axes, rows, strict=True):
        _draw(part, calibration, row)
        row[0].set_ylabel(f"{case}: observed")
    for k in range(gamma):
        axes[0][k].set_title(f"position {k + 1}", fontsize=9)
        axes[-1][k].set_xlabel("predicted survival", fontsize=8)


def _draw(records: Records, calibration: Calibration, row: Sequence[Axes]) -> None:
    raw = Calibration.identity(records.gamma)
    for name, used, colour in (("before", raw, "tab:red"), ("after", calibration, "tab:blue")):
        survival, found = used.apply(records.confidence).cumprod(1), quality(records, used)
        for k, axis in enumerate(row):
            seen = records.verified[:, k]
            predicted, observed, counts = reliability(survival[seen, k], records.survived[seen, k])
            axis.plot(predicted, observed, "o-", color=colour, markersize=3, label=f"{name}, ECE {found.ece[k]:.1%}")
            axis.bar(predicted, counts / max(counts.sum(), 1), width=1 / BINS, color=colour, alpha=0.15)
    for axis in row:
        axis.plot([0, 1], [0, 1], "k--", linewidth=0.8)
        axis.legend(fontsize=7)


def plot_graphs(graphs: Mapping[str, DraftGraph], counts: Mapping[str, Counts], figure: Figure) -> None:
    """Draw how often base decoding comes to each state of the draft graphs: a panel per class, a bar per node, coloured
    by how many steps lead to it."""
    figure.set_size_inches(5 * len(graphs), 3.5)
    panels = figure.subplots(1, len(graphs), squeeze=False)[0]
    for axis, (name, graph) in zip(panels, graphs.items(), strict=True):
        shares = [counts[name].nodes[node] / max(counts[name].roots, 1) for node in graph.nodes]
        labels = [" ".join(f"{i},{j}" for i, j in sorted(node)) for node in graph.nodes]
        axis.barh(labels, shares, color=[f"C{depth - 1}" for depth in graph.depths.tolist()])
        axis.invert_yaxis()
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("share of states that come to it")
    panels[0].set_ylabel("node: position rank, token rank")
