"""A profile with a price of drafts that is far too high is corrected by probes, at one percent of the time."""

import numpy as np
import pytest
from planning import view

from outrider.scheduler.contract import FinishedStep
from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.cost.step_times import Point
from outrider.scheduler.planner import Asynchronous
from outrider.scheduler.probing import SHARE

GAMMA, PLAIN, DRAFT, MOST = 7, 3e-3, 1e-3, 60_000
FIRST = 10
"""Steps of which the planner does not know yet whether drafts are accepted."""


def rest(price: float) -> tuple[int, float]:
    """Steps of one request until its drafts are verified, and the share of probes in their time. Drafts are not timed,
    as on a GPU. price: seconds of a draft by the profile."""
    draw = np.random.default_rng(0)
    points = [Point(1, tokens, 0, (PLAIN,)) for tokens in range(1, GAMMA + 2)]
    planner = Asynchronous(StepCost([*points, Point(1, 0, 0, (price,))]), GAMMA)
    survival = (0.8 ** np.arange(1, GAMMA + 1)).astype(np.float32)[None]
    nothing, one, probes, seconds = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64), 0, 0.0
    for number in range(MOST):
        step = view(1, GAMMA)
        budget = planner.budget(step)
        if budget.draft and not budget.probe and number > FIRST:
            return number, probes * DRAFT / seconds
        probes += budget.draft
        took = PLAIN * draw.normal(1, 0.03) + budget.draft * DRAFT
        seconds += took
        planner.observe(
            FinishedStep(
                view=step, survival=survival, verify_lens=nothing, accept_lens=one, draft_mask=np.array([budget.draft]),
                drafting=int(budget.draft), tokens=1, seconds=took, draft_seconds=None if budget.draft else 0.0,
            )
        )  # fmt: skip
    return MOST, probes * DRAFT / seconds


@pytest.mark.parametrize("times", [20, 100, 1000])
def test_no_stale_profile_rests_for_ever(times: int) -> None:
    """One draft of the stale price is saved for before the first probe, a few more until the price is right."""
    steps, share = rest(times * DRAFT)
    assert steps < 5 * times * DRAFT / (SHARE * PLAIN)
    assert share < 1.5 * SHARE


def test_a_right_price_that_does_not_pay_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.DRAFT", 50e-3)
    steps, share = rest(50e-3)
    assert steps == MOST
    assert share < 1.5 * SHARE
