"""Runs an asynchronous planner with given confidences and outcomes."""

import numpy as np
import torch
from finished import observe

from outrider.kernels.drafts import survival_of
from outrider.scheduler.contract import StepView
from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.planner import Asynchronous

GAMMA = 3
CHEAP = [1.0 + 0.3 * k for k in range(2 * GAMMA + 1)]
LIKELY, UNLIKELY = (np.full((2, GAMMA), c, dtype=np.float32) for c in (0.9, 0.5))


def run(
    planner: Asynchronous,
    step: StepView,
    confidence: np.ndarray,
    accepted: int | np.ndarray = 0,
    *,
    draft: bool | None = None,
) -> int | None:
    """One step; returns the tokens of its budget, None without drafting. `draft` overrules the planner."""
    budget = planner.budget(step)
    asked = budget.draft_mask(step.limits) if draft is None else (step.limits > 0) & draft
    lens = torch.from_numpy(step.limits * asked)
    verify_lens = planner.admit(torch.from_numpy(confidence), lens, budget).numpy()
    survival = survival_of(torch.from_numpy(confidence), lens).numpy()
    observe(planner, step, survival, verify_lens, np.minimum(verify_lens, accepted) + 1, asked, None)
    return budget.tokens if budget.draft else None


def uncorrected(cost: StepCost, gamma: int = GAMMA, smoothing: int = 1) -> Asynchronous:
    """A planner that learns no correction of survivals."""
    planner = Asynchronous(cost, gamma, smoothing=smoothing, held=1, required_return=1.0)
    planner.correction.observe = planner.correction.fade = lambda *args: None
    return planner
