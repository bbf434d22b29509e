"""Throughput curves: expected tokens per second of a step, by the draft tokens that it verifies (DSpark, 3.2.2).

With the survivals of earlier drafts, sorted, Theta(K) = (R + sum of the K largest survivals) / seconds(K).

numpy sorts 16-bit integers by radix: 1,792 of them (256 requests, gamma 7) take 5 us on any CPU. Floats take 75 us
where numpy has no vectorised sort. So survivals are rounded down to steps of 1 / RESOLUTION before sorting, which
keeps their order.
"""

from dataclasses import dataclass

import numpy as np

LARGEST = 1.25
"""Largest survival, of confidences that are corrected upward."""
RESOLUTION = (2**16 - 1) / LARGEST
"""Steps in a survival of 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Points 0..n of a step, each of which admits one survival more, the largest first.

    throughput: [n+1] expected tokens per second. seconds: [n+1] expected.
    values: [n] the survivals, where a point is a least survival; None: a point is a number of tokens.
    samples: [n] the sample that each survival is of; there are `count`.
    """

    throughput: np.ndarray
    seconds: np.ndarray
    values: np.ndarray | None = None
    samples: np.ndarray | None = None
    count: int = 1

    def most(self, point: int) -> int:
        """Budget of draft tokens: the most that any sample admits, so that a step stays before a cliff of its time."""
        return point if self.samples is None or not point else int(np.bincount(self.samples[:point]).max())

    def least(self, point: int) -> float:
        """Least survival to admit, between the last admitted one and the next; 0: no bound."""
        return 0.0 if self.values is None or not point else float(self.values[point - 1 : point + 1].sum()) / 2

    @property
    def tokens(self) -> np.ndarray:
        """[n+1] mean draft tokens verified at every point."""
        return np.arange(len(self.throughput)) / self.count


def curve_by_tokens(requests: int, survival: np.ndarray, seconds: np.ndarray, *, padded: bool = False) -> Curve:
    """The curve with numbers of tokens as points; their survivals are means over the samples.

    survival: [samples, R, gamma]. seconds: [room+1] of a step with 0..room admitted tokens. Survivals of 0 are never
    admitted, so the points beyond the last survival above 0 take as long as its point, unless steps are `padded`.
    """
    ordered = largest_survivals(survival.reshape(len(survival), -1), len(seconds) - 1)
    total = ordered[0] if len(ordered) == 1 else ordered.mean(0)
    tokens = np.empty(len(seconds))
    tokens[0], tokens[1:] = requests, total
    tokens[1:] *= 1 / RESOLUTION
    if not padded and len(total) and not total[-1]:
        seconds = seconds[np.minimum(np.arange(len(seconds)), np.count_nonzero(total))]
    return Curve(tokens.cumsum() / seconds, seconds)


def curve_by_survival(requests: int, survival: np.ndarray, seconds: np.ndarray) -> Curve:
    """The curve with least survivals as points: good drafts are verified deeper than poor ones. Tokens and seconds
    are means over the samples.

    survival: [samples, R, gamma]. seconds: [room+1] of a step with 0..room admitted tokens.
    """
    samples = len(survival)
    best = largest_survivals(survival.reshape(samples, -1), len(seconds) - 1)
    order = np.argsort(~best, axis=None, kind="stable")[: np.count_nonzero(best)]
    values, (sample, place) = best.ravel()[order].astype(np.int64), np.divmod(order, max(best.shape[1], 1))
    tokens = np.append(requests, values * (1 / (RESOLUTION * samples))).cumsum()
    # Each point adds a token to one sample; that sample's step then takes the time of one more.
    taken = np.append(seconds[0], np.diff(seconds)[place] * (1 / samples)).cumsum()
    return Curve(tokens / taken, taken, values * (1 / RESOLUTION), sample, samples)


def largest_survivals(survival: np.ndarray, count: int) -> np.ndarray:
    """[samples, min(count, n)] uint16: the largest survivals of each sample in descending order, in steps of
    1 / RESOLUTION. survival: [samples, n] float32 in 0..LARGEST."""
    ordered = (survival * np.float32(RESOLUTION)).astype(np.uint16)
    ordered.sort(axis=1, kind="stable")  # "stable" is the radix sort
    return ordered[:, ::-1][:, :count]
