"""The choice of prompts that are never trained on: by the prompt alone, the same for every answer to it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

HELD_OUT = 8
"""One prompt in so many is never trained on."""


def prompt_name(prompt_ids: Sequence[int]) -> str:
    """A short name of a prompt, the same for every answer to it."""
    return hashlib.sha256(np.asarray(prompt_ids, np.int32).tobytes()).hexdigest()[:16]


def held_out(prompt: str) -> bool:
    """True if answers to the prompt of this name are kept for the gate, and never trained on."""
    return int(prompt, 16) % HELD_OUT == 0
