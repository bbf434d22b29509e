"""The asynchronous planner's memory of finished steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .base import Budget, FinishedStep, StepView
from .survival_history import Correction, SurvivalDecay, SurvivalHistory

DISCARD_WEIGHT = 0.02
"""Weight of a step in the running mean of model drafts that a lookup replaced."""


@dataclass(slots=True)
class Issued:
    """A planned step. room: most draft tokens, over all requests. budget: None until it is decided."""

    number: int
    view: StepView
    room: int
    budget: Budget | None = None

    @property
    def probe(self) -> bool:
        return self.budget is not None and self.budget.probe

    @property
    def depth(self) -> int | None:
        return None if self.budget is None else self.budget.depth


class Past:
    """Survivals of every request, and how acceptance compared with them.

    history: survivals of requests for which the model could draft. lookups: survivals of lookups alone; None before the
    first. discard_rate: how often the model drafts and the lookup's draft is then taken.
    """

    def __init__(self, gamma: int):
        self.gamma = gamma
        self.history = SurvivalHistory(gamma)
        self.lookups: SurvivalHistory | None = None
        self.decay = SurvivalDecay(gamma)
        self.correction = Correction()
        self.discard_rate = 1.0

    def absorb(self, issued: Issued, step: FinishedStep, block: int | None) -> None:
        """Learn from a step. block: `Planner.block`."""
        survival = step.survival
        idle = issued.probe and not np.count_nonzero(step.verify_lens)
        taught = step.verify_lens if issued.view.ruled is None else np.where(issued.view.ruled, 0, step.verify_lens)
        self.correction.observe(survival, taught, step.accept_lens, step.draft_mask, fade=idle)
        rows, generations, groups = issued.view.rows, issued.view.generations, issued.view.groups
        if step.looked_up is not None:
            self.lookups = self.lookups or SurvivalHistory(self.gamma, prior=0.0)
            found = self.correction.apply(survival * step.looked_up[:, None], by_model=False)
            self.lookups.write(rows, generations, found, issued.number, groups=groups)
        draft_mask = step.draft_mask
        if not np.count_nonzero(draft_mask):
            return
        if np.count_nonzero(draft_mask) < len(draft_mask):
            rows, generations, survival = rows[draft_mask], generations[draft_mask], survival[draft_mask]
            groups = None if groups is None else groups[draft_mask]
        survival = self.correction.apply(survival, by_model=True)
        taken = np.ones(len(survival), dtype=bool) if step.looked_up is None else ~step.looked_up[draft_mask]
        if (depth := issued.depth) is not None and block is not None and depth < block:
            survival[taken] = self.decay.extrapolate(survival[taken], depth, block)
        self.decay.write(survival[taken])
        if others := len(taken) - (count := int(np.count_nonzero(taken))):
            self.discard_rate += DISCARD_WEIGHT * (min(max(step.drafting - count, 0) / others, 1.0) - self.discard_rate)
        self.history.write(rows, generations, survival, issued.number, taken, groups)
