"""Planners that bound nothing themselves, on a GPU: there a step's size is decided before its drafts are there, so
what recent steps have verified bounds the next one."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from .base import FinishedStep, Planner, StepView
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
