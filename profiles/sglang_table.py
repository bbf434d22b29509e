"""A measured profile as the table that SGLang's own DSPARK reads (`--speculative-dspark-sps-table-path`).

SGLang looks up whole steps per second by verified tokens alone, at the largest measured count that is not above. Its
steps always draft, so drafting is included here. Of requests and context, which its table does not have, each count of
tokens gets the median over the requests it was measured for, at the smallest context.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np

from outrider.scheduler.cost.model import StepCost

from .store import write_json


def sglang_table(cost: StepCost) -> dict[str, Any]:
    """sample_batch_tokens strictly rising, sample_steps_per_sec of the same length, max_batch_tokens."""
    shapes: dict[int, dict[int, float]] = {}
    for point in cost.points:  # ordered by context within a shape, so the smallest stays
        if point.tokens:
            shapes.setdefault(point.tokens, {}).setdefault(point.requests, point.context)
    tokens = sorted(shapes)
    rates = [
        statistics.median(
            float(cost.steps_per_second(requests, np.array([count]), context, drafted=True)[0])
            for requests, context in shapes[count].items()
        )
        for count in tokens
    ]
    return {"sample_batch_tokens": tokens, "sample_steps_per_sec": rates, "max_batch_tokens": tokens[-1]}


def export(cost: StepCost, path: Path) -> None:
    """Write the table to `path`."""
    write_json(path, sglang_table(cost))
