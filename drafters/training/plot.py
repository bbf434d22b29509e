"""The loss curves of a run as a PNG; needs matplotlib, which training itself does not."""

from __future__ import annotations

import csv
from pathlib import Path


def plot_losses(table: Path, picture: Path) -> bool:
    """Draw losses.csv; False when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    anchors = [int(r["anchors"]) for r in rows]
    for name in ("ce", "tv", "confidence"):
        axes[0].plot(anchors, [float(r[name]) for r in rows], label=name)
    axes[0].set_ylabel("loss per position")
    axes[1].plot(anchors, [float(r["first"]) for r in rows], label="c* of the first position")
    axes[1].plot(anchors, [float(r["accept"]) for r in rows], label="mean c*")
    tau = [(int(r["anchors"]), float(r["tau"])) for r in rows if r["tau"]]
    if tau:
        axes[1].plot(*zip(*tau, strict=True), "o-", label="tau, held out")
    for axis in axes:
        axis.set_xlabel("anchors")
        axis.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    return True
