"""The classes whose confidences are calibrated apart: what is known of a draft before any of its tokens is drawn.

How often a token is accepted depends on the rule that accepts it and on who drafted it. The rules: at temperature 0 it
equals the target's; above, if it passes the test of its block (`CalibrationTable.verification`), token by token with a
chance of 1 - TV(p, q); with a seed, if it is what the target draws with the same noise, at least (1 - TV) / (1 + TV).
All of this is known beforehand, so that a
correction by it tells nothing about the draw.
"""

import numpy as np
import torch

SAMPLING = ("greedy", "sampled", "seeded")
SOURCES = ("model", "lookup", "across", "grammar")
"""A drafter model; prompt lookup in the request's own text; the same in other texts (`drafters/corpora.py`); text that
a grammar forces."""
ADDED = ("across", "grammar")
"""Sources that older calibrations lack. Their confidences are then taken as they are."""
CLASSES = tuple(f"{sampling}, {source}" for sampling in SAMPLING for source in SOURCES)
LIKE_SGLANG = (CLASSES.index("greedy, model"), CLASSES.index("sampled, model"))
"""Cases that SGLang's own DSpark has as well."""


def classes_of(temperatures: torch.Tensor, seeded: torch.Tensor) -> torch.Tensor:
    """[R] int64 place in CLASSES of a model's draft for each request, before that of the other sources: temperatures
    [R], seeded [R] bool."""
    return (temperatures > 0) * (seeded + 1) * len(SOURCES)


def looked_up(classes: np.ndarray) -> np.ndarray:
    """[R] bool, drafts of prompt lookup among those of classes [R]."""
    found: np.ndarray = classes % len(SOURCES) > 0
    return found
