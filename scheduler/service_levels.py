"""Service levels: a request may ask for a minimum of tokens per second.

A step keeps a level if it is expected to bring the request that many tokens per second of the step. The planner keeps
as many levels as any step could, and then maximises throughput: so a level that can be kept bounds the step's length,
and a level that not even the shortest step keeps has no effect.
"""

import numpy as np

MARGIN = 1.1
"""Planned speed over the requested level: prefills and other work come between decode steps."""


def behind(levels: np.ndarray, progress: np.ndarray) -> np.ndarray | None:
    """[R] bool, requests slower so far than their level; None when there are none."""
    late = progress < levels
    return late if late.any() else None


def levels_kept(levels: np.ndarray, tokens: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """[n] int64, how many of L levels a step of each length `seconds` [n] keeps.

    levels: [L] tokens per second, above 0. tokens: [L] that the step is expected to bring each request.
    """
    allowed = np.sort(tokens / (levels * MARGIN))
    return len(allowed) - np.searchsorted(allowed, seconds)
