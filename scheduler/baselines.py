"""The simple planners: DSpark's Algorithm 1, which knows costs, and two that do not.

They choose after drafting. But a GPU's step has its size before its drafts are there: then the tokens that recent steps
verified bound the next one.
"""

import math
from collections import deque

import numpy as np
import torch

from outrider.kernels.drafts import survival_of
from outrider.kernels.upload import upload

from .admission import largest
from .contract import Budget, FinishedStep, Planner, StepView
from .cost.model import StepCost


class BucketBoundedPlanner(Planner):
    """Drafts at every step. With buckets the largest of the last eight steps bounds the next one; a step that used up
    its bound may have wanted more, and counts twice. Without buckets there is no bound."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=8)  # draft tokens of a request, of observed steps
        self._bounds: deque[tuple[StepView, int]] = deque()  # of steps that are not observed yet

    def budget(self, step: StepView) -> Budget:
        return Budget(draft=bool(step.limits.any()), tokens=self.bound(step))

    def bound(self, step: StepView) -> int | None:
        """`Budget.tokens` of `step`; called once for each."""
        if self.buckets is None:
            return None
        requests, room = len(step.rows), int(np.add.reduce(step.limits))
        wanted = max(math.ceil(max(self._recent) * requests), 1) if self._recent else room
        tokens = self.buckets.fill_bucket(requests, wanted, room)
        self._bounds.append((step, tokens))
        return tokens

    def observe(self, step: FinishedStep) -> None:
        super().observe(step)
        while self._bounds:
            view, bound = self._bounds.popleft()
            if view is step.view:
                verified = int(np.add.reduce(step.verify_lens))
                self._recent.append((2 * verified + 1 if verified >= bound else verified) / len(view.rows))
                return


class VerifyAll(BucketBoundedPlanner):
    """Verify every drafted token, or at most `gamma` of each request; 0: never draft."""

    def __init__(self, gamma: int | None = None):
        super().__init__()
        if gamma is not None and gamma < 0:
            raise ValueError(f"gamma is 0 or more, not {gamma}")
        self.gamma = gamma

    def budget(self, step: StepView) -> Budget:
        return Budget(draft=self.gamma != 0 and bool(step.limits.any()), tokens=self.bound(step))

    def admit(self, confidence: torch.Tensor, draft_lens: torch.Tensor, budget: Budget) -> torch.Tensor:
        lens = draft_lens if self.gamma is None else draft_lens.clamp(max=self.gamma)
        if budget.tokens is None:
            return lens
        places = torch.arange(confidence.shape[1], device=confidence.device)
        in_turns = torch.where(places > 0, places / (places + 1), 1.0)  # survival 1 / (k + 1): all first tokens first
        return largest(in_turns.expand(confidence.shape), lens, budget.tokens)


class Threshold(BucketBoundedPlanner):
    """Verify while survival is at least `threshold`, whatever the load (DSpark, section 4.3.3). 0 verifies all."""

    def __init__(self, threshold: float):
        super().__init__()
        if not 0 <= threshold <= 1:
            raise ValueError(f"a threshold of survival lies in 0..1, not {threshold}")
        self.threshold = threshold

    def admit(self, confidence: torch.Tensor, draft_lens: torch.Tensor, budget: Budget) -> torch.Tensor:
        if budget.tokens is None:
            return torch.minimum((survival_of(confidence) >= self.threshold).sum(1), draft_lens)
        bounds = np.full(confidence.shape[1], self.threshold, dtype=np.float32)
        return largest(confidence, draft_lens, budget.tokens, bounds=bounds)


class Synchronous(BucketBoundedPlanner):
    """Admits tokens by descending survival while each raises the throughput tau / T; stops at the first that does not.

    It reads this step's confidences, and is lossless because it stops: whether a token is admitted depends on larger
    survivals alone. It finds the best length only where throughput has a single peak. With buckets a step's size, and
    so its time, is decided before; the search then only leaves out tokens that do not pay.
    """

    cost: StepCost

    def __init__(self, cost: StepCost):
        super().__init__()
        self.cost = cost

    def budget(self, step: StepView) -> Budget:
        room = int(step.limits.sum())
        seconds = self.verifying(self.cost, step, room)
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
