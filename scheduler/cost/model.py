"""The cost of a decode step: T(requests, verified tokens, cached context), and drafting on top.

DSpark (section 3.2.2) looks up SPS(B), steps per second by verified tokens B, in a measured table. Here the step time
T is measured in three dimensions and SPS(B) = 1 / T is its slice at the current requests and context. Real curves are
jagged (section 5.2), so they are neither fitted nor smoothed:

- a measured point keeps its measured time, dips included;
- between two points the time rises linearly, or, where it falls, stays at the larger until the smaller is reached:
  an unmeasured step is never assumed to be cheaper;
- beyond the measured points it rises as steeply as it was ever seen to rise.

Times of served steps correct the model: `drift.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from .drift import Drift, running_mean
from .step_times import Point, merge, split


class StepCost:
    """The cost model of one engine on one machine.

    points: measured; combinations may be missing, but a step without drafts is needed (else ValueError).
    """

    def __init__(self, points: Iterable[Point]):
        self.points = tuple(merge(points))
        verify, draft = split(self.points)
        if not verify:
            raise ValueError("a step-cost model needs at least one measured step without drafting")
        self._curves = _curves(verify)
        self._sizes = [curve.requests for curve in self._curves]
        sizes, times = np.array([*draft] or [1]), np.maximum.accumulate([*draft.values()] or [0.0])
        self._draft_sizes = np.append(sizes, 1 << 24)
        self._draft_times = _along(sizes, times[None], self._draft_sizes)[0]
        self.drift = Drift()
        self._deciding: dict[int, float] = {}  # mean seconds by bits of the number of requests
        self._dense = lru_cache(self._make_dense)  # of 512 requests it has 400 kB

    # -- prices ---------------------------------------------------------------------------------------------------

    def seconds(self, requests: int, tokens: np.ndarray, context: float) -> np.ndarray:
        """[n] float64 seconds of a step that verifies `tokens` [n] int (anchors included) of `requests` requests.

        context: tokens in the cache, summed over the requests. Drafting is not included. Raises ValueError where
        tokens are fewer than requests.
        """
        columns = tokens - requests
        if columns.min() < 0:
            raise ValueError(f"{requests} requests verify at least as many tokens, not {tokens.min()}")
        return self._dense(requests, int(columns.max()).bit_length()).at(columns, context) * self.drift.plain

    def draft_seconds(self, drafts: Any) -> Any:
        """Seconds that drafts add to a step, for a number of whole drafts or an array of numbers; 0 where drafting was
        not measured. Two drafts of half the tokens count as one; any drafting takes at least the time of one draft."""
        return self._draft_measured(drafts) * (self.drift.plain * self.drift.draft)

    def _draft_measured(self, drafts: Any) -> Any:
        return np.interp(np.maximum(drafts, 1.0), self._draft_sizes, self._draft_times) * np.sign(drafts)

    # -- slow drift -----------------------------------------------------------------------------------------------

    def observe(
        self, requests: int, tokens: int, context: float, drafts: float, seconds: float,
        draft_seconds: float | None = None,
    ) -> None:  # fmt: skip
        """Learn from a step that took `seconds`, including a number of whole drafts.

        draft_seconds: the part of the drafts; None: unknown. Then the step's time beyond its price without drafts
        teaches the time of drafts, and none of steps. Impossible times are ignored.
        """
        if not (math.isfinite(seconds) and seconds > (draft_seconds or 0.0) >= 0):
            return
        columns = np.array([tokens - requests])
        measured = float(self._dense(requests, int(columns[0]).bit_length()).at(columns, context)[0])
        drafting = float(self._draft_measured(drafts))
        if drafting and draft_seconds is None:
            left = seconds - measured * self.drift.plain
            self.drift.observe_draft(drafting, left, drafting / (measured + drafting))
            return
        if drafting and draft_seconds:
            self.drift.observe_draft(drafting, draft_seconds)
        self.drift.observe(measured, seconds - (draft_seconds or 0.0))

    def deciding(self, requests: int) -> float:
        """Seconds that the host takes to look up, plan and admit in a step of about `requests`; 0: unknown."""
        bits = requests.bit_length()
        nearest = min(self._deciding, key=lambda known: abs(known - bits), default=0)
        return self._deciding.get(nearest, 0.0)

    def observe_deciding(self, requests: int, seconds: float) -> None:
        """Learn that the host has looked up, planned and admitted for `seconds` in a step."""
        bits = requests.bit_length()
        self._deciding[bits] = running_mean(self._deciding.get(bits, 0.0), seconds)

    # -- dense curves ---------------------------------------------------------------------------------------------

    def _make_dense(self, requests: int, bits: int) -> _Dense:
        """Times for 2 ** bits numbers of tokens: requests, requests + 1, …"""
        tokens = np.arange(requests, requests + (1 << bits))
        upper = bisect_right(self._sizes, requests)
        low = other = self._curves[max(upper - 1, 0)]
        if requests > low.requests and len(self._curves) > 1:  # not measured: between two numbers, or beyond
            other = self._curves[upper if upper < len(self._curves) else upper - 2]
        knots = sorted(low.knots | other.knots)
        knots.append(2 * knots[-1] + 1)  # for the slope beyond the last
        contexts = np.array(knots)
        if other is low:
            return _Dense(knots, low.at(tokens, contexts))
        if other.requests > low.requests:
            weight = (requests - low.requests) / (other.requests - low.requests)
            return _Dense(knots, _between(low, other, weight, tokens, contexts))
        more = (requests - low.requests) * _per_request(other, low, contexts)
        return _Dense(knots, low.at(tokens, contexts) + more)


class _Dense:
    """Times of one number of requests for every number of tokens, linear in the context between knots.

    knots: k ascending contexts. times: [k, length] seconds at these.
    """

    def __init__(self, knots: list[float], times: np.ndarray):
        times = np.maximum.accumulate(times, axis=0)  # more context is never cheaper
        self.knots, self.times = knots, times[:-1]
        self.slopes = np.diff(times, axis=0) / np.diff(knots)[:, None]

    def at(self, columns: np.ndarray, context: float) -> np.ndarray:
        """[n] seconds of `columns` [n]; contexts below the smallest knot cost as much as that."""
        knot = min(max(bisect_right(self.knots, context) - 1, 0), len(self.times) - 1)
        beyond = max(context - self.knots[knot], 0.0)
        result = self.slopes[knot].take(columns)
        result *= beyond
        result += self.times[knot].take(columns)
        return result


class _Curve:
    """Times [contexts, tokens] of one number of requests, without gaps. The last context is the largest measured one
    plus 1, for the slope beyond it."""

    def __init__(self, requests: int, contexts: np.ndarray, tokens: np.ndarray, times: np.ndarray):
        self.requests, self.tokens = requests, tokens
        self.knots = frozenset(contexts[:-1].tolist())
        self.first, self.last = int(tokens[0]), int(tokens[-1])
        self._contexts, self._times = contexts, times

    def at(self, tokens: np.ndarray, contexts: np.ndarray) -> np.ndarray:
        """[k, n] seconds of `tokens` [n] at `contexts` [k]."""
        times = _along(self.tokens, self._times, tokens)
        slopes = np.diff(times, axis=0) / np.diff(self._contexts)[:, None]
        knot = np.clip(np.searchsorted(self._contexts, contexts, side="right") - 1, 0, len(slopes) - 1)
        return times[knot] + np.clip(contexts - self._contexts[knot], 0, None)[:, None] * slopes[knot]


def _along(xs: np.ndarray, ys: np.ndarray, x: np.ndarray) -> np.ndarray:
    """[k, n] `ys` [k, m] over ascending `xs` [m] at `x` [n], by the rules of this module.

    Below the first point: the value there. Beyond a single point: in proportion.
    """
    if len(xs) == 1:
        return ys * np.maximum(x / xs[0], 1.0)
    left = np.clip(np.searchsorted(xs, x, side="right") - 1, 0, len(xs) - 1)
    slopes = np.clip(np.diff(ys, axis=1) / np.diff(xs), 0, None)
    slopes = np.hstack([slopes, slopes.max(axis=1, keepdims=True)])
    return ys[:, left] + slopes[:, left] * np.clip(x - xs[left], 0, None)


def _between(low: _Curve, high: _Curve, weight: float, tokens: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    """[k, n] seconds at `tokens` [n] between two measured numbers of requests, `weight` of the way to `high`.

    They are compared at equal tokens, because kernels have their cliffs there. Where only one of the two was measured,
    the other keeps its distance to it.
    """
    both = np.maximum(tokens, high.first)
    extra = np.clip(high.at(both, contexts) - _prolonged(low, high, both, contexts), 0, None)
    return _prolonged(low, high, tokens, contexts) + weight * extra


def _prolonged(low: _Curve, high: _Curve, tokens: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    """[k, n] seconds of `low`, which beyond its last point rises as `high` was measured to rise."""
    inside = low.at(np.minimum(tokens, low.last), contexts)
    start = np.array([max(low.last, high.first)])
    rise = np.clip(high.at(np.maximum(tokens, start), contexts) - high.at(start, contexts), 0, None)
    if high.first > low.last:  # unmeasured between both: straight to the first point of `high`
        gap = np.clip((tokens - low.last) / (high.first - low.last), 0, 1)
        rise = rise + gap * np.clip(high.at(start, contexts) - low.at(np.array([low.last]), contexts), 0, None)
    return inside + rise


def _per_request(below: _Curve, last: _Curve, contexts: np.ndarray) -> np.ndarray:
    """[k, 1] most seconds that a further request adds at equal tokens, by the curves of the two largest numbers."""
    shared = last.tokens[last.tokens <= below.last]
    if not len(shared):
        return np.zeros((len(contexts), 1))
    rise = (last.at(shared, contexts) - below.at(shared, contexts)) / (last.requests - below.requests)
    return np.clip(rise.max(axis=1, keepdims=True), 0, None)


def _curves(verify: dict[tuple[int, int, float], float]) -> list[_Curve]:
    """One curve per measured number of requests; cells that were measured at some contexts only are filled in."""
    cells: dict[int, dict[int, dict[float, float]]] = {}
    for (requests, tokens, context), seconds in sorted(verify.items()):
        cells.setdefault(requests, {}).setdefault(tokens, {})[context] = seconds
    slopes = [
        max((by[later] - by[context]) / (later - context), 0.0)
        for rows in cells.values()
        for by in rows.values()
        for context, later in pairwise(by)
    ]
    usual, curves = float(np.median(slopes or [0.0])), []
    for requests, rows in cells.items():
        measured = sorted({context for by in rows.values() for context in by})
        contexts = np.array([*measured, measured[-1] + 1])
        times = np.stack([_fill(by, contexts, usual) for by in rows.values()], axis=1)
        curves.append(_Curve(requests, contexts, np.array(list(rows)), times))
    return curves


def _fill(by_context: dict[float, float], contexts: np.ndarray, usual: float) -> np.ndarray:
    """Seconds of one cell at all `contexts`, never falling. usual: seconds per token of context where it has one."""
    xs, ys = np.array(list(by_context)), np.maximum.accumulate(list(by_context.values()))
    slope = float((ys[-1] - ys[-2]) / (xs[-1] - xs[-2])) if len(xs) > 1 else usual
    return np.interp(contexts, xs, ys) + slope * np.clip(contexts - xs[-1], 0, None)
