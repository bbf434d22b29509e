"""The cases whose confidences are calibrated apart: what is known of a draft before any of its tokens is drawn.

How often a token is accepted depends on the rule that accepts it (equality at temperature 0, min(1, p/q) above) and on
who drafted it; both are known beforehand, so a correction by them tells nothing about the draw.
"""

from __future__ import annotations

import torch

SAMPLING = ("greedy", "sampled")
SOURCES = ("model", "lookup")
CASES = tuple(f"{sampling}, {source}" for sampling in SAMPLING for source in SOURCES)
BY_MODEL = tuple(place for place, case in enumerate(CASES) if case.endswith(SOURCES[0]))


def cases_of(temperatures: torch.Tensor, looked_up: torch.Tensor | None) -> torch.Tensor:
    """[R] int64 place in CASES of each request's draft; temperatures [R], looked_up [R] bool or None as in `Draft`."""
    cases = (temperatures > 0) * len(SOURCES)
    return cases if looked_up is None else cases + looked_up
