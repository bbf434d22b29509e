"""What a planner is shown of a finished step, from what a test says of it."""

from __future__ import annotations

import numpy as np

from outrider.scheduler.planners.base import FinishedStep, Planner, StepView


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
    """`Planner.observe`; drafting None: the model drafted for all that it could."""
    count = int(np.count_nonzero(draft_mask)) if drafting is None else drafting
    tokens = len(step.rows) + int(np.sum(verify_lens))
    planner.observe(
        FinishedStep(
            step, survival, verify_lens, accept_lens, draft_mask, count, looked_up, tokens=tokens, seconds=seconds
        )
    )
