"""The step-cost model keeps measured points and assumes no cheaper steps in between."""

import json
from typing import Any

import numpy as np
import pytest

from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.cost.step_times import Point, merge


def jagged_grid(seed: int, contexts: tuple[int, ...] = (128, 1024), gamma: int = 7) -> list[Point]:
    """Random times around a line, with cliffs and dips; time grows with context."""
    rng = np.random.default_rng(seed)
    points = []
    for requests in (1, 2, 4, 8, 16, 32):
        for n in range(1, gamma + 2):
            base = (5e-3 + 3e-4 * requests * n) * rng.uniform(0.6, 1.4)
            slope = rng.uniform(0, 2e-7)
            for context in contexts:
                points.append(Point(requests, requests * n, requests * context, (base + slope * requests * context,)))
    return points


def at(cost: StepCost, requests: int, tokens: int, context: float) -> float:
    return float(cost.seconds(requests, np.array([tokens]), context)[0])


@pytest.mark.parametrize("seed", range(5))
def test_measured_points_are_kept_exactly(seed: int) -> None:
    points = jagged_grid(seed)
    cost = StepCost(points)
    for point in points:
        assert at(cost, point.requests, point.tokens, point.context) == pytest.approx(point.median, rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_between_two_measured_token_counts_no_step_is_cheaper_than_the_line(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = jagged_grid(seed, contexts=(128,))
    cost = StepCost(points)
    medians = {(p.requests, p.tokens): p.median for p in points}
    for requests in (2, 8, 32):
        tokens = np.arange(requests, 8 * requests + 1)
        times = cost.seconds(requests, tokens, requests * 128.0)
        for _ in range(50):
            b = int(rng.integers(requests, 8 * requests))
            low = b // requests * requests
            left, right = medians[requests, low], medians[requests, low + requests]
            line = left + (right - left) * (b - low) / requests
            assert times[b - requests] == pytest.approx(max(line, left), rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("low", "high", "between"), [(8, 16, 11), (16, 32, 20), (1, 2, 2)])
def test_between_two_measured_request_counts_no_step_is_cheaper_than_the_line(
    seed: int, low: int, high: int, between: int
) -> None:
    cost = StepCost(jagged_grid(seed))
    tokens = np.arange(high, 8 * low + 1)
    context = 1024.0 * low
    left, right = cost.seconds(low, tokens, context), cost.seconds(high, tokens, context)
    got = cost.seconds(between, tokens, context)
    line = left + (right - left) * (between - low) / (high - low)
    assert np.all(got >= line - 1e-12)
    if between < high:
        assert np.all(got >= left - 1e-12)
        assert np.all(got <= np.maximum(left, right) + 1e-12)


def test_no_gain_is_invented_between_request_counts_that_were_measured() -> None:
    """On a line in tokens and requests, 20 requests cost the line although only 16 and 32 were measured."""
    true = lambda r, b: 5e-3 + 1e-4 * r + 3e-4 * b  # noqa: E731
    cost = StepCost(Point(r, r * n, 0, (true(r, r * n),)) for r in (16, 32) for n in range(1, 9))
    tokens = np.arange(20, 161)
    np.testing.assert_allclose(cost.seconds(20, tokens, 0), true(20, tokens), rtol=1e-9)


def test_a_dip_at_a_number_of_tokens_is_seen_between_request_counts() -> None:
    """Kernels have cliffs at a number of tokens, whichever requests these belong to."""
    cost = StepCost(Point(r, r * n, 0, (0.5 if r * n == 64 else 1.0,)) for r in (16, 32) for n in range(1, 9))
    times = cost.seconds(20, np.arange(20, 129), 0)
    assert np.all(times[:44] == 1)
    assert times[44] == 0.5
    np.testing.assert_allclose(times[44:60], 0.5 + np.arange(16) / 32)  # rising, so along the line to 80 tokens
    assert np.all(times[60:] == 1)


def test_beyond_the_measured_tokens_it_rises_as_steeply_as_it_ever_did() -> None:
    cost = StepCost(Point(1, b, 0, (t,)) for b, t in [(1, 1.0), (2, 4.0), (3, 4.5)])
    np.testing.assert_allclose(cost.seconds(1, np.array([3, 4, 5]), 0), [4.5, 7.5, 10.5])


def test_beyond_the_measured_requests_it_is_never_cheaper_than_within() -> None:
    true = lambda r, b: 5e-3 + 1e-4 * r + 3e-4 * b  # noqa: E731
    cost = StepCost(Point(r, r * n, 0, (true(r, r * n),)) for r in (8, 16) for n in range(1, 9))
    tokens = np.arange(64, 129)
    np.testing.assert_allclose(cost.seconds(64, tokens, 0), true(64, tokens), rtol=1e-9)
    assert np.all(cost.seconds(64, tokens, 0) > cost.seconds(16, tokens, 0))
    assert np.all(
        StepCost(jagged_grid(3)).seconds(64, tokens, 1000) >= StepCost(jagged_grid(3)).seconds(32, tokens, 1000)
    )


def test_a_single_measured_point_is_prolonged_in_proportion() -> None:
    cost = StepCost([Point(4, 4, 0, (2.0,))])
    np.testing.assert_allclose(cost.seconds(4, np.array([4, 8, 12]), 0), [2.0, 4.0, 6.0])
    assert at(cost, 1, 1, 0) == 2.0


def test_a_gap_between_curves_is_crossed_without_a_free_stretch() -> None:
    cost = StepCost([Point(1, 1, 0, (1.0,)), Point(1, 2, 0, (2.0,)), Point(8, 8, 0, (8.0,)), Point(8, 16, 0, (16.0,))])
    times = cost.seconds(2, np.arange(2, 17), 0)
    assert np.all(np.diff(times) > 0.9)
    np.testing.assert_allclose(times, np.arange(2, 17), rtol=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("requests", [1, 5, 16, 40])
def test_more_context_is_never_cheaper(seed: int, requests: int) -> None:
    points = jagged_grid(seed)
    noisy = [Point(p.requests, p.tokens, p.context, (p.median * (0.8 if p.context > 5000 else 1),)) for p in points]
    cost = StepCost(noisy)
    tokens = np.arange(requests, 8 * requests + 1)
    contexts = np.linspace(0, 3000 * requests, 40)
    times = np.array([cost.seconds(requests, tokens, context) for context in contexts])
    assert np.all(np.diff(times, axis=0) >= -1e-15)


def test_context_is_linear_between_and_beyond_the_measured() -> None:
    cost = StepCost([Point(2, 2, 100, (1.0,)), Point(2, 2, 300, (1.2,))])
    assert [at(cost, 2, 2, c) for c in (0, 100, 200, 300, 500)] == pytest.approx([1.0, 1.0, 1.1, 1.2, 1.4])


def test_where_one_context_was_measured_the_slope_of_the_others_holds() -> None:
    """An interrupted tune: the larger context was measured for one number of requests only."""
    points = [Point(1, b, 100, (1.0 + b,)) for b in (1, 2)] + [Point(1, b, 200, (1.5 + b,)) for b in (1, 2)]
    cost = StepCost([*points, Point(4, 4, 400, (10.0,)), Point(4, 8, 400, (12.0,))])
    assert at(cost, 4, 4, 400) == 10.0
    assert at(cost, 4, 8, 600) == pytest.approx(12.0 + 200 * 0.005)


def test_contexts_that_are_almost_equal_are_one() -> None:
    """A live engine's contexts vary; noise must not become a slope."""
    rounds = [Point(1, 1, 130.2, (1.0,)), Point(1, 1, 131.0, (1.2,)), Point(1, 1, 1024.0, (1.5,))]
    cost = StepCost(rounds)
    assert at(cost, 1, 1, 100) == pytest.approx(1.025)  # an octile
    assert at(cost, 1, 1, 1024) == 1.5
    assert at(cost, 1, 1, 2048) == pytest.approx(1.5 + 0.475 * 1024 / (1024 - 130.6))
    assert cost.points == tuple(rounds)


def test_drafting_costs_extra() -> None:
    alone = [Point(1, 1, 0, (1.0,)), Point(4, 4, 0, (1.0,)), Point(1, 0, 0, (0.2,)), Point(4, 0, 0, (0.5,))]
    assert [StepCost(alone).draft_seconds(r) for r in (1, 2, 4, 5)] == pytest.approx([0.2, 0.3, 0.5, 0.6])
    assert StepCost([Point(1, 1, 0, (1.0,))]).draft_seconds(7) == 0


def test_drift_follows_a_slower_machine_within_bounds() -> None:
    cost = StepCost(jagged_grid(0))
    rng = np.random.default_rng(0)
    before = cost.seconds(8, np.arange(8, 65), 2000)

    def steps(count: int, factor: float) -> None:
        for tokens in rng.integers(8, 65, count):
            cost.observe(8, int(tokens), 2000, 0, factor * before[tokens - 8])

    steps(300, 1.5)
    np.testing.assert_allclose(cost.seconds(8, np.arange(8, 65), 2000), 1.5 * before, rtol=0.02)
    steps(2000, 100)
    assert cost.drift.plain == 4.0
    steps(2000, 0.01)
    assert cost.drift.plain == 0.05


def test_a_stale_price_of_drafts_is_unlearnt_without_their_times() -> None:
    """Drafts on a GPU are not timed: a step's additional time is its draft's."""
    cost = StepCost([Point(1, 1, 0, (3.0,)), Point(1, 2, 0, (3.0,)), Point(1, 0, 0, (7.7,))])
    rng = np.random.default_rng(0)
    for _ in range(1000):
        cost.observe(1, 2, 0, 1, (3.0 + 0.5) * rng.normal(1, 0.05))
    assert cost.drift.plain == 1.0
    assert cost.draft_seconds(1) == pytest.approx(0.5, abs=0.15)
    for _ in range(1000):
        cost.observe(1, 2, 0, 1, 3.0)
    assert cost.draft_seconds(1) < 0.05


def test_drift_is_not_moved_by_hiccups_or_impossible_times() -> None:
    cost = StepCost(jagged_grid(0))
    right = at(cost, 8, 24, 2000)
    for _ in range(50):
        cost.observe(8, 24, 2000, 0, right)
    cost.observe(8, 24, 2000, 0, 10 * right)
    assert at(cost, 8, 24, 2000) < 1.01 * right
    rng = np.random.default_rng(0)
    for _ in range(2000):
        cost.observe(8, 24, 2000, 0, right * (10 if rng.random() < 0.03 else 1))
    settled = at(cost, 8, 24, 2000)
    assert settled < 1.03 * right
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        cost.observe(8, 24, 2000, 0, seconds)
    assert at(cost, 8, 24, 2000) == settled


def test_drift_counts_drafting_where_a_step_drafted() -> None:
    cost = StepCost([Point(1, 1, 0, (1.0,)), Point(1, 2, 0, (1.0,)), Point(1, 0, 0, (1.0,))])
    cost.observe(1, 2, 0, 1, 2.0, 1.0)
    assert (cost.drift.plain, cost.drift.draft) == (1.0, 1.0)
    for _ in range(400):
        cost.observe(1, 2, 0, 1, 2.5, 1.5)  # only drafting is slower
    assert cost.drift.plain == pytest.approx(1.0)
    assert cost.draft_seconds(1) == pytest.approx(1.5, rel=0.01)
    assert cost.draft_seconds(np.array([0.0, 1.0, 2.0])) == pytest.approx([0.0, 1.5, 3.0], rel=0.01)


def test_drafts_of_fewer_tokens_take_the_time_of_their_rows_but_no_less_than_one_draft() -> None:
    measured = ((1, 0.2), (2, 0.3), (4, 0.6))
    cost = StepCost([Point(1, 1, 0, (1.0,)), *(Point(r, 0, 0, (s,)) for r, s in measured)])
    assert [cost.draft_seconds(drafts) for drafts in (0, 0.5, 1.5, 4)] == pytest.approx([0.0, 0.2, 0.25, 0.6])
    for _ in range(400):
        cost.observe(1, 1, 0, 1.5, 1.5, 0.5)  # three drafts of half the tokens take twice the measured time
    assert cost.draft_seconds(4) == pytest.approx(1.2, rel=0.01)


def test_costs_do_not_depend_on_earlier_queries() -> None:
    points = jagged_grid(1)
    used, rng = StepCost(points), np.random.default_rng(0)
    for _ in range(300):
        requests = int(rng.integers(1, 60))
        tokens = rng.integers(requests, 8 * requests + 1, size=5)
        context = float(rng.uniform(0, 2000 * requests))
        np.testing.assert_array_equal(
            used.seconds(requests, tokens, context), StepCost(points).seconds(requests, tokens, context)
        )


def test_the_cache_is_bounded() -> None:
    cost = StepCost(jagged_grid(0))
    for requests in range(1, 200):
        cost.seconds(requests, np.arange(requests, 8 * requests + 1), 0)
    kept = cost._dense.cache_info()
    assert kept.currsize == kept.maxsize < 199


def test_json_keeps_every_repetition() -> None:
    points = merge([Point(1, 1, 5, (1.0,)), Point(1, 0, 5, (0.1, 0.2)), Point(1, 1, 5, (2.0, 1.5))])
    assert points[1].seconds == (1.0, 2.0, 1.5)
    assert points[1].median == 1.5
    assert points[1].spread == pytest.approx(1 / 1.5)
    cost = StepCost(points)
    back = StepCost(map(Point.from_json, json.loads(json.dumps([point.to_json() for point in cost.points]))))
    assert back.points == cost.points == tuple(points)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([], "at least one measured step"),
        ([{"requests": 4, "tokens": 3, "context": 0, "seconds": [1.0]}], "tokens >= requests"),
        ([{"requests": 1, "tokens": 1, "context": 0, "seconds": []}], "positive times"),
        ([{"requests": 1, "tokens": 1, "context": 0, "seconds": [-1.0]}], "positive times"),
    ],
)
def test_invalid_grids_are_refused_with_the_reason(data: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        StepCost(map(Point.from_json, data))


def test_fewer_tokens_than_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="at least as many tokens"):
        StepCost([Point(4, 4, 0, (1.0,))]).seconds(4, np.array([3]), 0)


def test_the_hosts_time_is_learned_by_the_number_of_requests() -> None:
    cost = StepCost([Point(1, 1, 0, (1.0,))])
    assert cost.deciding(1) == 0
    cost.observe_deciding(32, 0.013)
    assert cost.deciding(1) == cost.deciding(32) == 0.013
    cost.observe_deciding(1, 0.002)
    assert (cost.deciding(1), cost.deciding(3), cost.deciding(40)) == (0.002, 0.002, 0.013)
