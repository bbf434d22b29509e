"""Finished steps for planners, from a test's numbers, and whole steps of an asynchronous planner."""

import numpy as np
import torch
from planning import view

from outrider.kernels.drafts import survival_of
from outrider.scheduler.contract import FinishedStep, Planner, StepView
from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.planner import Asynchronous


def observe(
    planner: Planner,
    step: StepView,
    survival: np.ndarray,
    verify_lens: np.ndarray,
    accept_lens: np.ndarray,
    draft_mask: np.ndarray,
    seconds: float | None = None,
    looked_up: np.ndarray | None = None,
    drafting: int | None = None,
) -> None:
    """`Planner.observe`; drafting None: for all requests that the model could draft for."""
    count = int(np.count_nonzero(draft_mask)) if drafting is None else drafting
    tokens = len(step.rows) + int(np.sum(verify_lens))
    planner.observe(
        FinishedStep(
            step, survival, verify_lens, accept_lens, draft_mask, count, looked_up, tokens=tokens, seconds=seconds
        )
    )


def seasoned(planner: Planner, requests: int, gamma: int, steps: int = 4) -> Planner:
    """The planner after a few steps with random confidences and half of the drafts accepted."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        step = view(requests, gamma)
        budget = planner.budget(step)
        confidence = torch.from_numpy(rng.random((requests, gamma), dtype=np.float32))
        verify_lens = planner.admit(confidence, torch.full((requests,), gamma), budget).numpy()
        asked, computed = budget.draft_mask(step.limits), survival_of(confidence).numpy()
        observe(planner, step, computed, verify_lens, verify_lens // 2 + 1, asked, None, np.zeros(requests, dtype=bool))
    return planner


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
