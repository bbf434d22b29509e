"""How many draft states a forward has: what pays, and nothing where nothing does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.scheduler.draft_graphs.planning import TRIAL, Acceptance, RoundCost, StatePlanner, best_count


def cost(fixed: float, per_row: float) -> RoundCost:
    made = RoundCost()
    for rows in (1, 2, 4, 8) * 8:
        made.observe(rows, fixed + per_row * rows)
    return made


def test_the_line_through_rounds_of_late():
    made = cost(0.01, 0.002)
    assert made.seconds(np.array([1, 10])) == pytest.approx([0.012, 0.03])
    for rows in (1, 2, 4, 8) * 200:
        made.observe(rows, 0.05 + 0.001 * rows)
    assert made.seconds(np.array([10])) == pytest.approx([0.06], rel=1e-3)


def test_rounds_of_one_size_tell_nothing():
    made = RoundCost()
    for _ in range(100):
        made.observe(3, 0.01)
    assert not made.known
    assert cost(1.0, 1.0).known


def test_none_where_rows_cost_all_and_all_where_they_cost_nothing():
    chances, sizes = np.array([0.9, 0.5, 0.1]), np.array([1, 1, 2])
    assert best_count(1, 1, chances, sizes, cost(0.0, 0.01)) == 0
    assert best_count(1, 1, chances, sizes, cost(0.01, 0.0)) == 3
    assert best_count(1, 1, chances, sizes, cost(0.01, 0.007)) == 1


@given(
    st.lists(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 2)), max_size=4), min_size=1, max_size=4),
    st.floats(0.001, 1),
    st.floats(0, 0.1),
)
def test_no_more_than_there_is_and_never_worse_than_none(drafts, fixed, per_row):
    planner = StatePlanner()
    planner.cost = cost(fixed, per_row)
    chances = [np.array([chance for chance, _ in own]) for own in drafts]
    sizes = [np.array([size for _, size in own], dtype=np.int64) for own in drafts]
    counts = planner.admit(len(drafts), len(drafts), chances, sizes)
    assert all(0 <= count <= len(own) for count, own in zip(counts, drafts, strict=True))
    steps = len(drafts) + sum(float(own[:n].sum()) for own, n in zip(chances, counts, strict=True))
    rows = len(drafts) + sum(int(own[:n].sum()) for own, n in zip(sizes, counts, strict=True))
    without, planned = planner.cost.seconds(np.array([len(drafts), rows]))
    assert steps / planned >= len(drafts) / without * (1 - 1e-9)


def test_sizes_are_tried_again_and_again():
    planner = StatePlanner()
    planner.cost = cost(0.0, 0.01)  # nothing pays
    one = [np.array([0.5])], [np.array([1])]
    counts = [planner.admit(1, 1, *one)[0] for _ in range(4 * TRIAL)]
    assert sum(counts) == 4
    planner.cost = cost(0.01, 0.0)  # everything does
    counts = [planner.admit(1, 1, *one)[0] for _ in range(4 * TRIAL)]
    assert sum(counts) == 3 * TRIAL + TRIAL - 4


def test_acceptance_is_learnt_where_it_is_seen():
    found = Acceptance()
    scores, depths = np.full(200, 0.95), np.ones(200, dtype=np.int64)
    found.observe(scores, depths, np.arange(200) % 4 == 0)
    near, far, low = found.chances(np.array([0.93, 0.95, 0.15]), np.array([1, 2, 1]))
    assert near == pytest.approx(0.25, abs=0.03)
    assert far == pytest.approx(0.95**2)
    assert low == pytest.approx(0.15)
