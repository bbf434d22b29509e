"""The synchronous planner: DSpark's Algorithm 1, with its early stop."""

from __future__ import annotations

import numpy as np
import torch

from ..cost.model import StepCost
from ..upload import upload
from .admission import survival_of
from .base import Budget, StepView
from .baselines import BucketBoundedPlanner


class Synchronous(BucketBoundedPlanner):
    """Admits tokens by descending survival while each raises the throughput tau / T; stops at the first that does not.

    The stop is what keeps it lossless though it reads current confidences: a token is reached by decisions on larger
    survivals only. It finds the best length only where throughput has a single peak, and drafts at every step. With
    buckets a step's size, and so its time, is decided before; the search then only leaves out what does not pay.
    """

    cost: StepCost

    def __init__(self, cost: StepCost):
        super().__init__()
        self.cost = cost

    def budget(self, step: StepView) -> Budget:
        requests, room = len(step.rows), int(step.limits.sum())
        tokens = np.arange(requests, requests + room + 1)
        if self.buckets is not None:
            tokens = self.buckets.round_up_each(tokens)
        seconds = self.cost.seconds(requests, tokens, float(step.contexts.sum()))
        if not room:
            return Budget(draft=False, tokens=0, seconds=seconds)
        drafting = self.cost.draft_seconds(int((step.limits > 0).sum()))
        return Budget(draft=True, tokens=self.bound(step), seconds=seconds + drafting)

    def admit(self, confidence: torch.Tensor, draft_lens: torch.Tensor, budget: Budget) -> torch.Tensor:
        if budget.seconds is None:
            raise ValueError("the synchronous planner needs the budget that it gave for this step")
        seconds = budget.seconds if budget.tokens is None else budget.seconds[: budget.tokens + 1]
        return until_first_drop(survival_of(confidence, draft_lens), upload(seconds, confidence.device))


def until_first_drop(survival: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
    """verify_lens [R] int64 by Algorithm 1, lines 7 to 15, on any device and without waiting for it.

    survival: [R, gamma]. seconds: [m+1] float64 for 0..m admitted tokens; m bounds them.
    """
    ordered = survival.flatten().sort(descending=True, stable=True)
    best = ordered.values[: len(seconds) - 1]
    tokens = torch.nn.functional.pad(best.double(), (1, 0), value=float(len(survival))).cumsum(0)
    throughput = tokens / seconds[: len(tokens)]
    rising = (throughput[1:] > throughput[:-1]) & (best > 0)
    admitted = torch.zeros(survival.numel(), dtype=torch.int64, device=survival.device)
    admitted = admitted.scatter(0, ordered.indices[: len(best)], rising.long().cumprod(0))
    return admitted.view_as(survival).sum(1)
