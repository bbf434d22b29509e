"""The loss curves of a training run."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

from .loop import COLUMNS, SEEN

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_losses(table: Path, figure: Figure) -> None:
    """Draw losses.csv: losses left, acceptance and what was validated right, over the anchors trained on."""
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figure.set_size_inches(10, 4)
    axes = figure.subplots(1, 2)
    anchors = [int(r["anchors"]) for r in rows]
    for name in ("ce", "tv", "kl", "confidence"):
        if rows[0][name]:
            axes[0].plot(anchors, [float(r[name]) for r in rows], label=name)
    axes[0].set_ylabel("loss per position")
    axes[1].plot(anchors, [float(r["first"]) for r in rows], label="c* of the first position")
    axes[1].plot(anchors, [float(r["accept"]) for r in rows], label="mean c*")
    for measured in list(rows[0])[len(COLUMNS) :]:
        if found := [(int(r["anchors"]), float(r[measured])) for r in rows if r[measured]]:
            label = measured if measured.endswith(SEEN) else f"{measured}, held out"
            axes[1].plot(*zip(*found, strict=True), "o-", label=label)
    for axis in axes:
        axis.set_xlabel("anchors")
        axis.legend()
