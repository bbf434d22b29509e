"""Finished steps for planners, from a test's numbers."""

import numpy as np
import torch
from planning import view

from outrider.kernels.drafts import survival_of
from outrider.scheduler.contract import FinishedStep, Planner, StepView


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
