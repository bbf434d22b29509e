"""Reliability diagram: predicted against observed prefix survival, before and after calibration (DSpark, figure 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .classes import CLASSES
from .model import BINS, Calibration, quality
from .records import Records
from .table import CalibrationTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def reliability(predicted: np.ndarray, outcome: np.ndarray, bins: int = BINS) -> tuple[np.ndarray, ...]:
    """Mean prediction, mean outcome and count of each of `bins` equal-width bins that holds any of N."""
    place = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    counts = np.bincount(place, minlength=bins)
    held = counts > 0
    means = [np.bincount(place, values, minlength=bins)[held] / counts[held] for values in (predicted, outcome)]
    return means[0], means[1], counts[held]


def plot_reliability(records: Records, table: CalibrationTable, figure: Figure) -> None:
    """Draw a row per class that has records, a panel per position."""
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
