"""Classes of drafts, each with its own calibration: the rule that accepts a draft, and its source.

The rule: at temperature 0 a token must equal the target's. Above, it passes the test of its block, or is accepted by
itself with chance 1 - TV(p, q) (`CalibrationTable.verification`). With a seed it must be the token that the target
draws with the same noise, which has a chance of at least (1 - TV) / (1 + TV). Rule and source are known before a token
is drawn, so a correction by class cannot depend on the draw.
"""

import numpy as np
import torch

SAMPLING = ("greedy", "sampled", "seeded")
SOURCES = ("model", "lookup", "across", "grammar")
"""A drafter model; prompt lookup in the request's own text; the same in other texts (`drafters/corpora.py`); text that
a grammar forces."""
CLASSES = tuple(f"{sampling}, {source}" for sampling in SAMPLING for source in SOURCES)


def classes_of(temperatures: torch.Tensor, seeded: torch.Tensor) -> torch.Tensor:
    """[R] int64 places in CLASSES of the model's drafts, from temperatures [R] and seeded [R] bool."""
    return (temperatures > 0) * (seeded + 1) * len(SOURCES)


def looked_up(classes: np.ndarray) -> np.ndarray:
    """[R] bool: is a draft of class [R] from prompt lookup?"""
    return np.asarray(classes % len(SOURCES) > 0)
