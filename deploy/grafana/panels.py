"""Panels and common queries for the dashboards of `generate.py`."""

from __future__ import annotations

from dataclasses import dataclass

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Panel:
    """queries: by legend, PromQL in which S stands for the chosen servers and R for the interval of a rate.

    kind: time series, one number, or a heatmap of a histogram's buckets. most: where its axis ends.
    """

    title: str
    description: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    most: float | None = None


def share(title: str, description: str, queries: dict[str, str]) -> Panel:
    """A panel of a part of a whole."""
    return Panel(title, description, queries, "percentunit", most=1.0)


def rate(name: str, by: str = "", **labels: str) -> str:
    """Per second, over all servers chosen; labels: values, or regular expressions of them."""
    chosen = "".join(f',{label}=~"{value}"' for label, value in labels.items())
    return f"sum{f' by ({by})' if by else ''} (rate({name}{{S{chosen}}}[R]))"


def ratio(above: str, below: str, by: str = "", only: dict[str, str] | None = None, **labels: str) -> str:
    """A ratio of two rates. only: labels of what is above alone."""
    return f"{rate(above, by, **labels, **(only or {}))} / {rate(below, by, **labels)}"


def quantiles(histogram: str, **labels: str) -> dict[str, str]:
    buckets = rate(f"{histogram}_bucket", "le", **labels)
    return {f"p{q * 100:g}": f"histogram_quantile({q}, {buckets})" for q in QUANTILES}


def mean(histogram: str) -> str:
    return ratio(f"{histogram}_sum", f"{histogram}_count")
