"""Throughput curves: what a step brings and takes, by how much of the drafts is verified."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .sorting import RESOLUTION, largest, pooled


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Points 0..n of a step, at each of which one survival more is admitted, the largest first.

    throughput: [n+1] float64 tokens per second. seconds: [n+1] expected.
    values: [n] the survivals where points are told apart by the least survival that is admitted; None: by the number of
        tokens. samples: [n] the sample of each of these, of `count`.
    """

    throughput: np.ndarray
    seconds: np.ndarray
    values: np.ndarray | None = None
    samples: np.ndarray | None = None
    count: int = 1

    def most(self, point: int) -> int:
        """Budget of draft tokens: as many as in any sample, so that a step stays before cliffs that were in sight."""
        if self.samples is None or not point:
            return point
        return int(np.bincount(self.samples[:point]).max())

    def threshold(self, point: int) -> float:
        """Least survival, between the last that is admitted and the next; 0: no bound."""
        if self.values is None or not point:
            return 0.0
        return float(self.values[point - 1 : point + 1].sum()) / 2

    def verified(self, point: int) -> float:
        """Draft tokens of a step, in the mean."""
        return point if self.samples is None else point / self.count

    @property
    def tokens(self) -> np.ndarray:
        """[n+1] `verified` of every point."""
        return np.arange(len(self.throughput)) / self.count


def convex(seconds: np.ndarray) -> np.ndarray:
    """[n] the largest convex curve that is nowhere above `seconds` [n]: the cost of each further token, an
    expensive one averaged with the cheap ones behind it."""
    corners: list[int] = []
    for point in range(len(seconds)):
        while len(corners) > 1:
            first, last = corners[-2:]
            if (seconds[last] - seconds[first]) * (point - first) < (seconds[point] - seconds[first]) * (last - first):
                break
            corners.pop()
        corners.append(point)
    result: np.ndarray = np.interp(np.arange(len(seconds)), corners, seconds[corners])
    return result


def single_curve(requests: int, survival: np.ndarray, seconds: np.ndarray) -> Curve:
    """One sample: points are numbers of tokens.

    survival: [1, R, gamma]. Entries of 0 are never admitted, so with n others more than n tokens take the
        seconds of n. seconds: [room+1] of a step with 0..room admitted tokens.
    Counted in steps of 1 / RESOLUTION, see `largest`.
    """
    room = len(seconds) - 1
    ordered = largest(survival.reshape(1, -1), room)[0]
    tokens = np.empty(room + 1)
    tokens[0] = requests * RESOLUTION
    tokens[1:] = ordered
    torch.from_numpy(tokens).cumsum_(0)  # several times as fast as numpy's
    tokens *= 1 / RESOLUTION
    if room and not ordered[-1]:
        seconds = seconds[np.minimum(np.arange(room + 1), np.count_nonzero(ordered))]
    return Curve(tokens / seconds, seconds)


def mean_curve(requests: int, survival: np.ndarray, seconds: np.ndarray) -> Curve:
    """Several samples of steps whose size is decided before: points are numbers of tokens, what they bring is the mean.

    survival: [samples, R, gamma]. seconds: [room+1] of a step with 0..room admitted tokens, which it takes whether or
        not that many are there.
    """
    ordered = largest(survival.reshape(len(survival), -1), len(seconds) - 1)
    tokens = np.append(0.0, ordered.mean(0).cumsum()) / RESOLUTION + requests
    return Curve(tokens / seconds, seconds)


def pooled_curve(requests: int, survival: np.ndarray, seconds: np.ndarray) -> Curve:
    """Several samples: points are survivals, and tokens and seconds means over the samples of what reaches them.

    survival: [samples, R, gamma]. seconds: [room+1] of a step with 0..room admitted tokens.
    """
    samples = len(survival)
    values, which = pooled(survival.reshape(samples, -1), len(seconds) - 1)
    # Each point adds a token to one sample, whose step then takes the time of one more.
    order = np.argsort(which, kind="stable")
    counts = np.bincount(which, minlength=samples)
    place = np.empty(len(values), dtype=np.int64)
    place[order] = np.arange(len(values)) - np.repeat(counts.cumsum() - counts, counts)
    tokens = np.empty(len(values) + 1)
    tokens[0], tokens[1:] = requests, values * (1 / (RESOLUTION * samples))
    taken = np.empty(len(values) + 1)
    taken[0], taken[1:] = seconds[0], (seconds[place + 1] - seconds[place]) * (1 / samples)
    taken = taken.cumsum()
    return Curve(tokens.cumsum() / taken, taken, values * (1 / RESOLUTION), which, samples)
