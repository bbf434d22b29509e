"""Pictures of a profile: its steps, its draft graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.cost.step_times import level_contexts
from outrider.scheduler.spiffy.calibration import NodeCounts
from outrider.scheduler.spiffy.graph import DraftGraph

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_steps_per_second(cost: StepCost, figure: Figure) -> None:
    """Draw SPS(B) for each measured number of requests.

    Dots are measurements (bars: fastest and slowest repetition), lines the planner's interpolation. The plot shows the
    smallest context, without drafting.
    """
    figure.set_size_inches(7, 4.5)
    axis = figure.subplots()
    shapes: dict[int, dict[int, tuple[float, tuple[float, ...]]]] = {}
    for point in level_contexts(cost.points):
        if point.tokens:
            shapes.setdefault(point.requests, {}).setdefault(point.tokens, (point.context, point.seconds))
    for requests, measured in shapes.items():
        context = min(measured_context for measured_context, _ in measured.values())
        tokens = np.arange(min(measured), max(measured) + 1)
        [line] = axis.plot(tokens, 1.0 / cost.seconds(requests, tokens, context), label=f"{requests}")
        rates = [np.quantile(1.0 / np.array(seconds), [0, 0.5, 1]) for _, seconds in measured.values()]
        low, middle, high = np.transpose(rates)
        bars = np.vstack([middle - low, high - middle])
        axis.errorbar(list(measured), middle, bars, fmt="o", markersize=4, capsize=2, color=line.get_color())
    axis.set_xscale("log", base=2)
    axis.set_xlabel("tokens verified in a step")
    axis.set_ylabel("steps per second")
    axis.set_ylim(bottom=0)
    axis.legend(title="requests")


def plot_graphs(graphs: Mapping[str, DraftGraph], counts: Mapping[str, NodeCounts], figure: Figure) -> None:
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
