"""Draw a profile's steps: steps-per-second.png in its folder.

examples:
  python tests/measure/profile_picture.py profiles/shipped/*
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import script

from outrider.profiles import store
from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.cost.step_times import level_contexts
from outrider.server import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profiles", nargs="+", type=Path, metavar="FOLDER", help="profiles")


def run(args: argparse.Namespace) -> int:
    pictures.require("the picture")
    for folder in args.profiles:
        with pictures.figure(folder / "steps-per-second.png") as figure:
            plot_steps_per_second(store.read(folder).cost(), figure)
    return 0


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


if __name__ == "__main__":
    sys.exit(script.main(sys.modules[__name__]))
