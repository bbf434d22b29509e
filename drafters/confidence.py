"""Confidences of drafters without a head for them, from the draft's own distribution."""

from __future__ import annotations

import torch


def own_confidence(q: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Chances [R] float32 that tokens drawn from q [R, V'] are accepted; q alone decides, never the token drawn.

    temperatures: [R]; q of greedy requests is that of temperature 1.
    """
    return q.amax(-1)
