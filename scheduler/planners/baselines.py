"""The simple planners: they know no costs, and learn nothing."""

from __future__ import annotations

import torch

from outrider.scheduler.planners.admission import survival_of
from outrider.scheduler.planners.base import Budget, Planner, StepView


class VerifyAll(Planner):
    """Verify every drafted token."""

    def admit(self, confidence: torch.Tensor, draft_lens: torch.Tensor, budget: Budget) -> torch.Tensor:
        return draft_lens


class StaticGamma(Planner):
    """Verify at most `gamma` tokens of each request; 0: never draft."""

    def __init__(self, gamma: int):
        if gamma < 0:
            raise ValueError(f"gamma is 0 or more, not {gamma}")
        self.gamma = gamma

    def budget(self, step: StepView) -> Budget:
        return Budget(draft=self.gamma > 0 and bool(step.limits.any()), tokens=None)

    def admit(self, confidence: torch.Tensor, draft_lens: torch.Tensor, budget: Budget) -> torch.Tensor:
        return draft_lens.clamp(max=self.gamma)


class Threshold(Planner):
    """Verify while survival is at least `threshold`, whatever the load (DSpark, section 4.3.3). 0 verifies all."""

    def __init__(self, threshold: float):
        if not 0 <= threshold <= 1:
            raise ValueError(f"a threshold of survival lies in 0..1, not {threshold}")
        self.threshold = threshold

    def admit(self, confidence: torch.Tensor, draft_lens: torch.Tensor, budget: Budget) -> torch.Tensor:
        likely = (survival_of(confidence) >= self.threshold).sum(1)
        return torch.minimum(likely, draft_lens)
