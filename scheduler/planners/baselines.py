"""The simple planners: they know no costs.

They bound nothing themselves. On a GPU a step's size is decided before its drafts are there, so there what recent steps
have verified bounds the next one.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from .admission import largest, survival_of, top_k
from .base import Budget, FinishedStep, Planner, StepView
from .token_buckets import RecentDemand

LATE = 64
"""Steps that may be unobserved at a time."""


class BucketBoundedPlanner(Planner):
    """Without buckets there is no bound."""

    def __init__(self) -> None:
        self._demand = RecentDemand()
        self._issued: deque[tuple[StepView, int]] = deque(maxlen=LATE)

    def bound(self, step: StepView) -> int | None:
        """`Budget.tokens` of `step`; called once for each."""
        if self.buckets is None:
            return None
        requests, room = len(step.rows), int(np.add.reduce(step.limits))
        tokens = self.buckets.fill_bucket(requests, self._demand.tokens(requests, room), room)
        self._issued.append((step, tokens))
        return tokens

    def observe(self, step: FinishedStep) -> None:
        super().observe(step)
        while self._issued:
            issued, tokens = self._issued.popleft()
            if issued is step.view:
                self._demand.observe(step.verify_lens, tokens)
                return


def in_turns(draft_lens: torch.Tensor, gamma: int) -> torch.Tensor:
    """[R, gamma] float32 by which every request's first draft comes before any second; 0 behind `draft_lens` [R]."""
    steps = torch.arange(gamma, device=draft_lens.device)
    return (steps < draft_lens[:, None]) / (steps + 1.0)


class VerifyAll(BucketBoundedPlanner):
    """Verify every drafted token."""

    def budget(self, step: StepView) -> Budget:
        return Budget(draft=bool(step.limits.any()), tokens=self.bound(step))

    def admit(self, confidence: torch.Tensor, draft_lens: torch.Tensor, budget: Budget) -> torch.Tensor:
        if budget.tokens is None:
            return draft_lens
        return top_k(in_turns(draft_lens, confidence.shape[1]), budget.tokens)


class StaticGamma(VerifyAll):
    """Verify at most `gamma` tokens of each request; 0: never draft."""

    def __init__(self, gamma: int):
        super().__init__()
        if gamma < 0:
            raise ValueError(f"gamma is 0 or more, not {gamma}")
        self.gamma = gamma

    def budget(self, step: StepView) -> Budget:
        return Budget(draft=self.gamma > 0 and bool(step.limits.any()), tokens=self.bound(step))

    def admit(self, confidence: torch.Tensor, draft_lens: torch.Tensor, budget: Budget) -> torch.Tensor:
        return super().admit(confidence, draft_lens.clamp(max=self.gamma), budget)


class Threshold(BucketBoundedPlanner):
    """Verify while survival is at least `threshold`, whatever the load (DSpark, section 4.3.3). 0 verifies all."""

    def __init__(self, threshold: float):
        super().__init__()
        if not 0 <= threshold <= 1:
            raise ValueError(f"a threshold of survival lies in 0..1, not {threshold}")
        self.threshold = threshold

    def budget(self, step: StepView) -> Budget:
        return Budget(draft=bool(step.limits.any()), tokens=self.bound(step))

    def admit(self, confidence: torch.Tensor, draft_lens: torch.Tensor, budget: Budget) -> torch.Tensor:
        if budget.tokens is None:
            return torch.minimum((survival_of(confidence) >= self.threshold).sum(1), draft_lens)
        bounds = np.full(confidence.shape[1], self.threshold, dtype=np.float32)
        return largest(confidence, draft_lens, budget.tokens, bounds=bounds, admit=self.admit_by)
