"""The picture of a simulation, after DSpark's figures 7 and 8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_simulation(rows: Sequence[Mapping[str, float | str]], figure: Figure) -> None:
    """Draw rows of `Result.summary` with "planner" and "concurrency".

    Left: throughput against the speed of a user, one line per planner along the load. Right: tokens verified per
    request and step (the anchor included) against the requests that ran.
    """
    figure.set_size_inches(11, 4.5)
    left, right = figure.subplots(1, 2)
    for planner in dict.fromkeys(row["planner"] for row in rows):
        mine = [row for row in rows if row["planner"] == planner]
        left.plot([row["speed_p50"] for row in mine], [row["throughput"] for row in mine], "o-", label=str(planner))
        right.plot([row["concurrency"] for row in mine], [row["verified_per_request"] for row in mine], "o-")
    for axis in (left, right):
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
    left.set_yscale("log")
    left.yaxis.set_major_formatter("{x:g}")
    left.set_xlabel("tokens/s of a user (median)")
    left.set_ylabel("tokens/s in all")
    left.legend()
    right.set_xlabel("requests running")
    right.set_ylabel("tokens verified per request and step")
    right.set_ylim(bottom=0)
