"""Draft states of a forward: as many as pay."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.cost.step_times import Point
from outrider.scheduler.probing import SHARE
from outrider.scheduler.spiffy.learning import WINDOW, RoundCost, StateAcceptance
from outrider.scheduler.spiffy.planning import LOOKS, RoundView, StatePlanner


def cost(fixed: float, per_row: float) -> RoundCost:
    return RoundCost(StepCost([Point(1, rows, 0.0, (fixed + per_row * rows,)) for rows in (1, 1000)]))


def view(*names: int, levels: list[float] | None = None, progress: list[float] | None = None) -> RoundView:
    none, on_time = np.zeros(len(names)), np.full(len(names), np.inf)
    return RoundView(
        np.array(names), 0.0, np.array(levels) if levels else none, np.array(progress) if progress else on_time
    )


def admit(planner: StatePlanner, chances: list[float], sizes: list[float] | None = None, name: int = 0) -> int:
    sizes = sizes or [1.0] * len(chances)
    return planner.admit(view(name), 1, [np.array(chances)], [np.array(sizes)])[0]


def test_the_line_through_recent_rounds():
    made = RoundCost(block_size=16)
    for fixed, per_row in ((0.01, 0.02), (0.05, 0.001)):
        for rows in (1, 2, 4, 8) * 200:
            made.observe(rows, fixed + per_row * rows)
        assert made.seconds(np.array([2, 8])) == pytest.approx([fixed + 2 * per_row, fixed + 8 * per_row], rel=0.1)


def test_earlier_measurements_are_known_from_the_start_and_corrected():
    points = [Point(1, 4 * rows, 100.0, (0.01 + 0.001 * rows,)) for rows in (1, 2, 4, 8)]
    made = RoundCost(StepCost(points), block_size=4)
    assert made.known
    assert made.seconds(np.array([1, 2, 3.5]), 1, 100.0) == pytest.approx([0.011, 0.012, 0.0135])
    for rows in (1, 4) * 200:
        made.observe(rows, 2 * (0.01 + 0.001 * rows), 1, 100.0)
    assert made.seconds(np.array([1, 8]), 1, 100.0) == pytest.approx([0.022, 0.036], rel=0.05)


def test_rounds_of_one_size_leave_a_part_of_their_time_to_rows():
    made = RoundCost(block_size=16)
    assert not made.known
    for _ in range(100):
        made.observe(3, 0.012)
    assert made.known
    same, twice = made.seconds(np.array([3, 6]))
    assert same == pytest.approx(0.012)
    assert 1.3 * same < twice < 1.7 * same


def test_no_drafts_where_rows_are_dear_and_all_where_they_are_free():
    chances, sizes = [0.9, 0.5, 0.1], [1.0, 1.0, 2.0]
    assert admit(StatePlanner(cost(0.0, 0.01)), chances, sizes) == 0
    assert admit(StatePlanner(cost(0.01, 0.0)), chances, sizes) == 3
    assert admit(StatePlanner(cost(0.01, 0.007)), chances, sizes) == 1


@settings(deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 2)), max_size=4), min_size=1, max_size=4),
    st.floats(0.001, 1),
    st.floats(0, 0.1),
)
def test_no_more_drafts_than_exist_and_never_worse_than_none(drafts, fixed, per_row):
    planner = StatePlanner(cost(fixed, per_row))
    chances = [np.array([chance for chance, _ in own]) for own in drafts]
    sizes = [np.array([size for _, size in own]) for own in drafts]
    counts = planner.admit(view(*range(len(drafts))), len(drafts), chances, sizes)
    assert all(0 <= count <= len(own) for count, own in zip(counts, drafts, strict=True))
    steps = len(drafts) + sum(float(own[:n].sum()) for own, n in zip(chances, counts, strict=True))
    rows = len(drafts) + sum(float(own[:n].sum()) for own, n in zip(sizes, counts, strict=True))
    without, planned = planner.cost.seconds(np.array([len(drafts), rows]))
    assert steps / planned >= len(drafts) / without * (1 - 1e-9)


def test_no_state_is_drafted_while_costs_are_unknown():
    planner = StatePlanner()
    assert admit(planner, [1.0]) == 0
    planner.cost = cost(0.01, 0.0)
    assert admit(planner, [1.0]) == 1


def test_it_rests_where_no_draft_pays_and_probes_take_a_share_of_the_time():
    planner, seven = StatePlanner(cost(0.0, 0.01)), view(7)
    planner.observe_deciding(0.0005, 1)
    looks = []
    for _ in range(4000):
        looks.append(planner.looks(seven))
        if looks[-1]:
            assert admit(planner, [0.5], name=7) == 0
    assert looks[: LOOKS + 1] == [True] * LOOKS + [False]
    spent = sum(looks[LOOKS:]) * 0.0005
    assert 0 < spent <= SHARE * 4000 * 0.01


def test_the_round_before_a_probe_keeps_its_input():
    planner, seven = StatePlanner(cost(0.0, 0.01)), view(7)
    planner.observe_deciding(0.0005, 1)
    kept = True
    for _ in range(2000):
        if planner.looks(seven):
            assert kept
            admit(planner, [0.5], name=7)
        kept = not planner.rests


def test_a_rest_ends_when_drafts_pay_again_or_requests_join():
    planner, seven = StatePlanner(cost(0.0, 0.01)), view(7)
    planner.observe_deciding(0.0005, 1)
    for _ in range(LOOKS):
        assert planner.looks(seven)
        assert admit(planner, [0.5], name=7) == 0
    assert not planner.looks(seven)
    assert planner.looks(view(8))
    admit(planner, [0.5], name=8)
    planner.cost = cost(0.01, 0.0)
    drafted = [planner.looks(view(8)) and admit(planner, [0.5], name=8) for _ in range(20000)]
    assert any(drafted)
    assert all(drafted[drafted.index(1) + 200 :])


def test_drafts_that_save_less_than_the_host_takes_to_make_them_do_not_pay():
    for seconds, pays in ((0.004, True), (0.006, False)):
        planner = StatePlanner(cost(0.01, 0.0))  # a draft of chance 0.5 saves 5 ms
        planner.observe_deciding(seconds, 1)
        for _ in range(LOOKS):
            admit(planner, [0.5])
        assert planner.looks(view(0)) is pays


def test_a_gain_for_one_request_does_not_carry_over_to_eight():
    planner = StatePlanner(RoundCost(StepCost([Point(r, n, 0.0, (s,)) for r in (1, 8) for n, s in DEAR_AT_EIGHT[r]])))
    planner.observe_deciding(0.0005, 1)
    planner.observe_deciding(0.0005, 8)
    drafts, sizes = [np.array([0.6])], [np.ones(1)]
    eight = view(*range(1, 9))
    for _ in range(LOOKS):
        planner.looks(eight)
        assert sum(planner.admit(eight, 8, drafts * 8, sizes * 8)) == 0
    assert not planner.looks(eight)
    for _ in range(3 * LOOKS):
        assert planner.looks(view(0))
        assert planner.admit(view(0), 1, drafts, sizes) == [1]
    assert planner.looks(eight)
    assert sum(planner.admit(eight, 8, drafts * 8, sizes * 8)) == 0
    assert not planner.looks(eight)


DEAR_AT_EIGHT = {1: [(1, 0.01), (2, 0.011)], 8: [(8, 0.01), (16, 0.03)]}
"""Seconds by rows, by requests."""


def test_acceptance_is_learnt_where_it_is_observed():
    acceptance = StateAcceptance()
    scores, depths = np.full(200, 0.95), np.ones(200, dtype=np.int64)
    acceptance.observe(scores, depths, np.arange(200) % 4 == 0)
    near, far, low = acceptance.chances(np.array([0.93, 0.95, 0.15]), np.array([1, 2, 1]))
    assert near == pytest.approx(0.25, abs=0.03)
    assert far == pytest.approx(0.95**2)
    assert low == pytest.approx(0.15)


def test_acceptance_follows_changes():
    acceptance, one = StateAcceptance(), (np.array([0.95]), np.array([1]))
    for accepted in (True, False):
        for _ in range(4 * int(WINDOW)):
            acceptance.observe(*one, np.array([accepted]))
    assert acceptance.chances(*one)[0] < 0.05


def test_a_service_level_bounds_rounds_and_keeps_the_planner_awake():
    planner, drafts = StatePlanner(cost(0.02, 0.004)), [np.array([]), np.array([0.9, 0.9, 0.9])]
    sizes = [np.ones(len(own)) for own in drafts]
    planner.observe_steps(100, 100)
    assert planner.admit(view(1, 2), 2, drafts, sizes) == [0, 3]
    level = 1 / (0.02 + 0.004 * 3) / 1.1 * 0.999
    slow = view(1, 2, levels=[level, 0.0], progress=[np.inf, np.inf])
    assert planner.admit(slow, 2, drafts, sizes) == [0, 1]
    planner.observe_steps(100000, 200000)
    assert planner.admit(slow, 2, drafts, sizes) == [0, 3]
    planner, asks = StatePlanner(cost(0.0, 0.01)), view(7, levels=[1.0], progress=[np.inf])
    planner.observe_deciding(0.0005, 1)
    for _ in range(3 * LOOKS):
        assert planner.looks(asks)
        assert planner.admit(asks, 1, [np.array([0.5])], [np.ones(1)]) == [0]
        assert not planner.rests
