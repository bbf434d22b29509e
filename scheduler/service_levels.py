"""Service levels: a request may ask for a minimum of tokens per second.

A step keeps a level if the request's expected tokens over the step's seconds reach it. The planner keeps as many levels
as any step could, and then maximises throughput: so a level that can be kept bounds the step's length, and a level that
not even the shortest step keeps has no effect.
"""

import numpy as np

MARGIN = 1.1
"""Planned speed over the requested level, as prefills and other work come between decode steps."""


def levels_kept(levels: np.ndarray, tokens: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """[n] int64, how many of L levels a step of each length `seconds` [n] keeps.

    levels: [L] tokens per second, above 0. tokens: [L] that the step is expected to bring each request.
    """
    allowed = np.sort(tokens / (levels * MARGIN))
    return len(allowed) - np.searchsorted(allowed, seconds)
