"""Reliability diagram: predicted against observed prefix survival, before and after calibration (DSpark, figure 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from outrider.scheduler.calibration.model import BINS, Calibration, quality
from outrider.scheduler.calibration.records import Records

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def reliability(predicted: np.ndarray, outcome: np.ndarray, bins: int = BINS) -> tuple[np.ndarray, ...]:
    """Mean prediction, mean outcome and count of each of `bins` equal-width bins that holds any of N."""
    place = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    counts = np.bincount(place, minlength=bins)
    held = counts > 0
    means = [np.bincount(place, values, minlength=bins)[held] / counts[held] for values in (predicted, outcome)]
    return means[0], means[1], counts[held]


def plot_reliability(records: Records, calibration: Calibration, figure: Figure) -> None:
    """Draw one panel per position."""
    gamma = records.gamma
    figure.set_size_inches(2.6 * gamma, 3)
    axes = figure.subplots(1, gamma, sharey=True, squeeze=False)
    for name, used, colour in (("before", Calibration.identity(gamma), "tab:red"), ("after", calibration, "tab:blue")):
        survival, found = used.apply_numpy(records.confidence).cumprod(1), quality(records, used)
        for k, axis in enumerate(axes[0]):
            seen = records.verified[:, k]
            predicted, observed, counts = reliability(survival[seen, k], records.survived[seen, k])
            axis.plot(predicted, observed, "o-", color=colour, markersize=3, label=f"{name}, ECE {found.ece[k]:.1%}")
            axis.bar(predicted, counts / max(counts.sum(), 1), width=1 / BINS, color=colour, alpha=0.15)
    for k, axis in enumerate(axes[0]):
        axis.plot([0, 1], [0, 1], "k--", linewidth=0.8)
        axis.set_title(f"position {k + 1}", fontsize=9)
        axis.set_xlabel("predicted survival", fontsize=8)
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("observed")
