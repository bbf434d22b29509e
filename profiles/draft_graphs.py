"""Fingerprint of a draft graph, and its form in a profile; a graph of another kind is refused."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from outrider.scheduler.spiffy.graph import DraftGraph

TEMPERATURES = ("greedy", "sampled")
"""Classes of requests, each with a graph of its own."""


class GraphError(ValueError):
    """A draft graph that cannot be used; the message gives reason and remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFingerprint:
    """model: digest of the checkpoint. policy: how a step unmasks, with its numbers. block_size: B.
    temperature: class of the requests, one of TEMPERATURES.
    """

    model: str
    policy: str
    block_size: int
    temperature: str

    def differences(self, here: GraphFingerprint) -> list[str]:
        """Return the differences from `here`, for people; empty where they are the same."""
        return [
            f"{field.name.replace('_', ' ')} {stored!r}, here {ours!r}"
            for field in fields(self)
            if (stored := getattr(self, field.name)) != (ours := getattr(here, field.name))
        ]


def to_json(graph: DraftGraph, fingerprint: GraphFingerprint) -> dict[str, Any]:
    """Return the graph with its fingerprint, as JSON."""
    return {"fingerprint": asdict(fingerprint), "nodes": graph.to_json()}


def from_json(data: Any, here: GraphFingerprint) -> DraftGraph:
    """Read a graph from `to_json`; raises GraphError if it is damaged, or was calibrated for something else."""
    try:
        stored = GraphFingerprint(**data["fingerprint"])
        graph = DraftGraph.from_json(data["nodes"])
    except (KeyError, TypeError, ValueError) as error:
        raise GraphError(f"the draft graph is damaged ({error}); calibrate anew: outrider tune") from None
    if differ := stored.differences(here):
        raise GraphError(
            f"the draft graph was calibrated for another target: {'; '.join(differ)}. Calibrate this one: outrider tune"
        )
    return graph


def by_temperature(graphs: Any) -> dict[str, DraftGraph]:
    """Return the graphs of a profile by class; graphs: a list from `to_json`, known to fit."""
    return {entry["fingerprint"]["temperature"]: DraftGraph.from_json(entry["nodes"]) for entry in graphs}


def require(graphs: Any, here: GraphFingerprint) -> None:
    """Raise GraphError unless the graphs of a profile are one of each class, calibrated for `here` of that class."""
    try:
        classes = [entry["fingerprint"]["temperature"] for entry in graphs]
    except (KeyError, TypeError) as error:
        raise GraphError(f"the draft graphs are damaged ({error!r}); calibrate anew: outrider tune") from None
    if sorted(classes) != sorted(TEMPERATURES):
        raise GraphError(
            f"the draft graphs are of {classes}, not one of each of {TEMPERATURES}; calibrate: outrider tune"
        )
    for entry, temperature in zip(graphs, classes, strict=True):
        from_json(entry, replace(here, temperature=temperature))
