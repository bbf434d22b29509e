"""Planners decide each request's verification length ℓ from the draft's confidences.

Lossless rule (DSpark, appendix A): whether x_{r,k} is admitted may depend only on what was known before it was drawn.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Planner(Protocol):
    def plan(self, confidence: torch.Tensor, draft_lens: torch.Tensor) -> torch.Tensor:
        """verify_lens [R] int64 in 0..draft_lens from confidence [R, gamma] and draft_lens [R] int64."""
        ...


class VerifyAll:
    """Verify every drafted token: the baseline with a static gamma."""

    def plan(self, confidence: torch.Tensor, draft_lens: torch.Tensor) -> torch.Tensor:
        return draft_lens
