"""Draw README's chart: tokens per second of the embedded model, here and in other engines."""

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING

from performance_rows import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "Outrider": "#4a4fc9",
    "without speculation": "#a9acec",
    "llama.cpp": "#d08a2e",
    "openvino": "#5b8f6b",
    "vllm": "#8a8f98",
}
"""Engines in the order of their bars."""
OTHERS = frozenset({"llama.cpp", "openvino", "vllm"})
NAMES = {"ours": "Outrider", "plain": "without speculation"}
WIDTH = 0.16
"""Width of a bar; groups are 1 apart."""

Speeds = dict[str, dict[str, float]]
"""Tokens per second by engine and requests in flight."""


def speeds(record: Record) -> Speeds:
    """Medians over the rounds, from a record of a load by URL."""
    by_engine: Speeds = {}
    for load, arms in record["results"].items():
        for arm, rounds in arms.items():
            median = statistics.median(each["throughput"] for each in rounds)
            by_engine.setdefault(NAMES.get(arm, arm), {})[load] = median
    return by_engine


def draw(figure: "Figure", panels: Mapping[str, Speeds]) -> None:
    """Draw a panel for each processor."""
    figure.set_size_inches(9, 1 + 2.4 * len(panels))
    for axes, (title, by_engine) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        _draw_panel(axes, title, by_engine)


def _draw_panel(axes: "Axes", title: str, by_engine: Speeds) -> None:
    loads = list(next(iter(by_engine.values())))
    engines = [engine for engine in COLOURS if engine in by_engine]
    for place, engine in enumerate(engines):
        heights = [by_engine[engine][load] for load in loads]
        left = [group + (place - (len(engines) - 1) / 2) * WIDTH for group in range(len(loads))]
        bars = axes.bar(left, heights, WIDTH * 0.92, color=COLOURS[engine], label=engine)
        axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=1)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xticks(range(len(loads)), [f"{load} in flight" for load in loads])
    axes.set_ylabel("tokens per second")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
