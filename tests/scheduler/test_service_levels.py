"""Service levels: how they bound a step and order requests."""

import numpy as np
import torch
from finished import GAMMA, run, uncorrected
from planning import curve_cost, view


def levelled(levels: list[float], progress: list[float], seconds: list[float]) -> tuple:
    planner = uncorrected(curve_cost(2, seconds, draft=0.01))
    sure = np.full((2, GAMMA), 0.9, dtype=np.float32)
    for _ in range(3):
        run(planner, view(2, GAMMA), sure, draft=True)
    budget = planner.budget(view(2, GAMMA, levels=levels, progress=progress))
    return budget, sure


RISING = [1.0 + 0.15 * k for k in range(2 * GAMMA + 1)]


def test_the_strictest_level_that_can_be_kept_bounds_the_step():
    free, sure = levelled([0, 0], [5, 5], RISING)
    assert free.tokens == 2 * GAMMA
    expected = 1 + sure[0].cumprod().sum()
    level = expected / 1.4 / 1.1  # kept by steps of 1.4 seconds, with the margin
    bound, _ = levelled([level, 0], [5, 5], RISING)
    assert bound.draft
    assert bound.predicted_seconds(bound.tokens) <= 1.4
    assert bound.predicted_seconds(bound.tokens + 1) > 1.4
    stricter, _ = levelled([level / 2, level], [5, 5], RISING)
    assert stricter.tokens == bound.tokens


def test_a_level_that_no_step_keeps_is_ignored():
    free, _ = levelled([0, 0], [5, 5], RISING)
    hopeless, _ = levelled([1000, 0], [5, 5], RISING)
    assert hopeless.tokens == free.tokens
    beside, _ = levelled([1000, 0.1], [5, 5], RISING)
    assert beside.tokens == free.tokens


def test_a_level_that_only_plain_steps_keep_stops_drafting():
    seconds = [1.0] + [4.0 + 0.01 * k for k in range(1, 2 * GAMMA + 1)]
    level = [0.9, 0.0]
    planner = uncorrected(curve_cost(2, seconds, draft=2.5))
    sure = np.full((2, GAMMA), 0.99, dtype=np.float32)
    for _ in range(3):
        run(planner, view(2, GAMMA), sure, draft=True)
    budget = planner.budget(view(2, GAMMA, levels=level, progress=[5.0, 5.0]))
    assert not budget.draft


def test_requests_below_their_level_are_served_first():
    budget, _ = levelled([3.0, 3.0], [2.0, 4.0], RISING)
    assert budget.first.tolist() == [True, False]
    on_time, _ = levelled([3.0, 3.0], [np.inf, 3.0], RISING)
    assert on_time.first is None
    planner = uncorrected(curve_cost(2, RISING))
    better = torch.tensor([[0.3] * GAMMA, [0.9] * GAMMA])
    scarce = type(budget)(draft=True, tokens=4, first=np.array([True, False]))
    assert planner.admit(better, torch.tensor([GAMMA, GAMMA]), scarce).tolist() == [3, 1]
