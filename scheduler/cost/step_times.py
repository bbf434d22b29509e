"""Measured step times: the points that a step-cost model is made of, and their JSON."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np


@dataclass(frozen=True, slots=True)
class Point:
    """One combination that was measured, with every repetition.

    requests: R. tokens: verified in total, anchors included; 0: the draft, timed alone.
    context: tokens in the cache, summed over the requests. seconds: one per repetition.
    """

    requests: int
    tokens: int
    context: float
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.requests < 1 or self.context < 0 or (self.tokens < self.requests and self.tokens != 0):
            raise ValueError(f"a measured point needs requests >= 1, tokens >= requests, context >= 0; got {self}")
        if not self.seconds or not all(math.isfinite(s) and s > 0 for s in self.seconds):
            raise ValueError(f"a measured point needs positive times; got {self}")

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def undisturbed(self) -> float:
        """The lower octile: other work of the machine only ever adds time."""
        return float(np.quantile(self.seconds, 0.125))

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median over the repetitions."""
        return (max(self.seconds) - min(self.seconds)) / self.median

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Self:
        numbers = int(data["requests"]), int(data["tokens"]), float(data["context"])
        return cls(*numbers, tuple(float(seconds) for seconds in data["seconds"]))


def merge(points: Iterable[Point]) -> list[Point]:
    """One point for each combination, in order, with all repetitions."""
    times: dict[tuple[int, int, float], tuple[float, ...]] = {}
    for point in points:
        key = point.requests, point.tokens, point.context
        times[key] = times.get(key, ()) + point.seconds
    return [Point(*key, seconds) for key, seconds in sorted(times.items())]


def level_contexts(points: Iterable[Point]) -> list[Point]:
    """The points, merged after almost equal contexts of one number of requests (within 1.25 times the least) were set
    to their mean: a live engine does not hit a context exactly, and a slope between two such would be noise."""
    levels: dict[int, list[list[Point]]] = {}
    for point in sorted(points, key=lambda p: (p.requests, p.context)):
        known = levels.setdefault(point.requests, [])
        if not known or point.context > 1.25 * known[-1][0].context:
            known.append([])
        known[-1].append(point)
    groups = [group for known in levels.values() for group in known]
    means = [statistics.fmean(p.context for p in group) for group in groups]
    return merge(replace(p, context=mean) for group, mean in zip(groups, means, strict=True) for p in group)


def split(points: Sequence[Point]) -> tuple[dict[tuple[int, int, float], float], dict[int, float]]:
    """Undisturbed seconds of verifying by (requests, tokens, context), and of drafting by requests: the longest of all
    contexts."""
    merged = level_contexts(points)
    draft: dict[int, float] = {}
    for p in merged:
        if not p.tokens:
            draft[p.requests] = max(p.undisturbed, draft.get(p.requests, 0.0))
    return {(p.requests, p.tokens, p.context): p.undisturbed for p in merged if p.tokens}, draft
