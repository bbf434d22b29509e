"""Draft graphs as pictures: how often base decoding comes to each of their states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .calibration import Counts
from .graph import DraftGraph

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_graphs(graphs: Mapping[str, DraftGraph], counts: Mapping[str, Counts], figure: Figure) -> None:
    """A panel per class, a bar per node, coloured by how many steps lead to it."""
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
