"""The synchronous planner: DSpark's Algorithm 1, with its early stop."""

from __future__ import annotations

import numpy as np
import torch

from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.planners.admission import survival_of, top_k_numpy
from outrider.scheduler.planners.base import Budget, Planner, StepView


class Synchronous(Planner):
    """Admits tokens by descending survival while each raises the throughput tau / T; stops at the first that does not.

    The stop is what keeps it lossless though it reads current confidences: a token is reached by decisions on larger
    survivals only. It finds the best length only where throughput has a single peak, drafts at every step, and on a
    GPU waits for the confidences.
    """

    def __init__(self, cost: StepCost):
        self.cost = cost

    def budget(self, step: StepView) -> Budget:
        requests, room = len(step.rows), int(step.limits.sum())
        seconds = self.cost.seconds(requests, np.arange(requests, requests + room + 1), float(step.contexts.sum()))
        if not room:
            return Budget(draft=False, tokens=0, seconds=seconds)
        return Budget(draft=True, tokens=None, seconds=seconds + self.cost.draft_seconds(int((step.limits > 0).sum())))

    def admit(self, confidence: torch.Tensor, draft_lens: torch.Tensor, budget: Budget) -> torch.Tensor:
        if budget.seconds is None:
            raise ValueError("the synchronous planner needs the budget that it gave for this step")
        survival = survival_of(confidence, draft_lens).cpu().numpy()
        tokens = first_drop(len(survival), np.sort(survival, axis=None)[::-1], budget.seconds)
        return torch.from_numpy(top_k_numpy(survival, tokens)).to(confidence.device)

    def observe(
        self,
        step: StepView,
        survival: np.ndarray,
        verify_lens: np.ndarray,
        accept_lens: np.ndarray,
        asked: np.ndarray,
        seconds: float | None,
        looked_up: np.ndarray | None = None,
    ) -> None:
        if seconds is not None:
            requests = len(step.rows)
            context = float(np.add.reduce(step.contexts))
            tokens, drafting = requests + int(np.add.reduce(verify_lens)), int(np.count_nonzero(asked))
            self.cost.observe(requests, tokens, context, drafting, seconds)


def first_drop(requests: int, survival: np.ndarray, seconds: np.ndarray) -> int:
    """How many tokens Algorithm 1 admits: lines 7 to 15.

    survival: [n] in descending order. seconds: [m+1] for 0..m admitted tokens; m bounds them.
    """
    survival = survival[: len(seconds) - 1]
    tokens = np.concatenate([[requests], requests + np.cumsum(survival, dtype=np.float64)])
    throughput = tokens / seconds[: len(tokens)]
    stops = np.flatnonzero((throughput[1:] <= throughput[:-1]) | (survival <= 0))
    return int(stops[0]) if len(stops) else len(survival)
