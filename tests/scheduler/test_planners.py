"""Planners against brute force; the asynchronous planner's history, correction, curve and sort."""

import numpy as np
import pytest
import torch
from finished import CHEAP, GAMMA, LIKELY, observe, run, uncorrected
from planning import curve_cost, prefixes, value, view

from outrider.scheduler.baselines import Synchronous
from outrider.scheduler.contract import Budget
from outrider.scheduler.curve import LARGEST, RESOLUTION, largest_survivals
from outrider.scheduler.history import SAMPLES, SurvivalHistory
from outrider.scheduler.planner import Asynchronous


def jagged(rng: np.random.Generator, room: int) -> list[float]:
    return (1.0 + np.cumsum(rng.uniform(0, 0.3, room + 1)) + (rng.random(room + 1) < 0.3) * rng.uniform(0, 1)).tolist()


@pytest.mark.parametrize("seed", range(30))
def test_algorithm_1_finds_the_best_of_all_choices_where_throughput_has_one_peak(seed):
    rng = np.random.default_rng(seed)
    requests = int(rng.integers(1, 4))
    room = requests * GAMMA
    slope, start = rng.uniform(0.02, 0.6), rng.uniform(0.5, 2)
    seconds = [start + slope * k for k in range(room + 1)]  # linear: one peak
    planner = Synchronous(curve_cost(requests, seconds, draft=0.1))
    confidence = rng.random((requests, GAMMA)).astype(np.float32)
    lens = rng.integers(0, GAMMA + 1, requests)
    budget = planner.budget(view(requests, GAMMA))
    verify_lens = planner.admit(torch.from_numpy(confidence), torch.from_numpy(lens), budget)
    survival = confidence.cumprod(1)

    def throughput(counts: tuple[int, ...]) -> float:
        return (requests + value(survival, counts)) / (seconds[sum(counts)] + 0.1)

    best = max(throughput(counts) for k in range(room + 1) for counts in prefixes(lens.tolist(), k))
    assert throughput(tuple(verify_lens.tolist())) == pytest.approx(best, rel=1e-5)


def test_algorithm_1_stops_at_the_first_drop_though_more_would_pay():
    planner = Synchronous(curve_cost(1, [1.0, 2.0, 2.1, 2.2]))
    certain = torch.ones(1, 3)
    assert planner.admit(certain, torch.tensor([3]), planner.budget(view(1, 3))).tolist() == [0]


@pytest.mark.parametrize("seed", range(40))
def test_budget_is_the_best_of_the_jagged_curve_of_two_steps_ago(seed):
    rng = np.random.default_rng(seed)
    requests = int(rng.integers(1, 4))
    limits = rng.integers(0, GAMMA + 1, requests).tolist()
    room, draft = sum(limits), rng.uniform(0, 0.2)
    seconds = jagged(rng, requests * GAMMA)
    planner = uncorrected(curve_cost(requests, seconds, draft=draft))
    confidences = [rng.random((requests, GAMMA)).astype(np.float32) ** 0.3 for _ in range(3)]
    steps = [view(requests, GAMMA, limits=limits) for _ in confidences]
    run(planner, steps[0], confidences[0], draft=room > 0)
    run(planner, steps[1], confidences[1], draft=room > 0)
    budget = planner.budget(steps[2])
    survival = confidences[0].cumprod(1)
    cost = planner.cost.seconds(requests, np.arange(requests, requests + room + 1), 0.0)
    throughputs = [
        (requests + max(value(survival, f) for f in prefixes(limits, k))) / (cost[k] + draft) for k in range(room + 1)
    ]
    if not budget.draft or budget.probe:
        assert room == 0 or requests / cost[0] >= max(throughputs) * (1 - 1e-4)
    else:
        assert max(throughputs) > requests / cost[0] * (1 - 1e-4)
        assert throughputs[budget.tokens] == pytest.approx(max(throughputs), rel=1e-4)  # survivals are rounded to 2e-5
        assert budget.predicted_seconds(budget.tokens) == pytest.approx(cost[budget.tokens] + draft)


def test_a_plan_holds_for_a_few_steps_of_the_same_requests():
    """A plan holds until it expires or a request joins."""
    planner = Asynchronous(curve_cost(2, CHEAP), GAMMA, smoothing=1, held=3)
    planner.correction.observe = lambda *args, **kwargs: None
    less = np.full((2, GAMMA), 0.75, dtype=np.float32)
    order = [LIKELY] * 4 + [less] * 4 + [LIKELY] * 4
    budgets = [run(planner, view(2, GAMMA), confidence) for confidence in order]
    changes = [n for n in range(3, len(budgets)) if budgets[n] != budgets[n - 1]]
    assert changes
    assert all(n % 3 == 0 for n in changes)
    made = planner._last
    run(planner, view(2, GAMMA, generations=[1, 2]), LIKELY)
    assert planner._last is not made
    with pytest.raises(ValueError, match="held"):
        Asynchronous(curve_cost(2, CHEAP), GAMMA, held=0)


def test_late_observation_plans_the_same():
    """On a GPU a step is observed only after the next one has been planned."""
    prompt, late = (uncorrected(curve_cost(2, CHEAP)) for _ in range(2))
    rng = np.random.default_rng(1)
    waiting, budgets = None, []
    for _ in range(20):
        confidence = rng.random((2, GAMMA)).astype(np.float32) ** 0.2
        expected = run(prompt, view(2, GAMMA), confidence)
        step = view(2, GAMMA)
        budget = late.budget(step)
        budgets.append((expected, budget.tokens if budget.draft else None))
        if waiting is not None:
            observe(late, *waiting)
        survival = confidence.cumprod(1)
        waiting = (
            step,
            survival,
            np.zeros(2, dtype=np.int64),
            np.ones(2, dtype=np.int64),
            budget.draft_mask(step.limits),
            None,
        )
    assert len({expected for expected, _ in budgets}) > 2
    assert all(expected == planned for expected, planned in budgets)


def test_steps_are_observed_in_order_and_once():
    planner = uncorrected(curve_cost(1, CHEAP))
    step = view(1, GAMMA)
    planner.budget(step)
    arguments = (LIKELY[:1].cumprod(1), np.array([1]), np.array([1]), np.array([True]), None)
    observe(planner, step, *arguments)
    with pytest.raises(ValueError, match="step order"):
        observe(planner, step, *arguments)


@pytest.mark.parametrize(
    "other",
    [
        {"generations": [2, 1]},  # row 0 went to another request, or its request was retracted and prefilled again
        {"rows": [5, 1]},  # request 0 left, a new one joined in another row
    ],
)
def test_history_belongs_to_a_request(other):
    """A new request in row 0 starts from the mean of all requests."""
    planner = uncorrected(curve_cost(2, CHEAP))
    good_then_bad = np.array([[0.99] * GAMMA, [0.2] * GAMMA], dtype=np.float32)
    for _ in range(50):
        run(planner, view(2, GAMMA), good_then_bad, draft=True)
    same, _ = planner.history.read(view(2, GAMMA).rows, np.array([1, 1]), 1)
    known = planner.history.counts(view(2, GAMMA).rows, np.array([1, 1])) > 0
    assert known.all()
    assert same[0] == pytest.approx(good_then_bad.cumprod(1), rel=1e-5)
    changed = view(2, GAMMA, **other)
    curve, _ = planner.history.read(changed.rows, changed.generations, 1)
    known = planner.history.counts(changed.rows, changed.generations) > 0
    assert known.tolist() == [False, True]
    assert curve[0, 0] == pytest.approx(good_then_bad.cumprod(1).mean(0), rel=0.05)
    assert curve[0, 1] == pytest.approx(good_then_bad[1].cumprod(), rel=1e-5)


def test_groups_are_independent():
    history, groups = SurvivalHistory(GAMMA), np.array([0, 7])
    bad, good = (np.full(GAMMA, share, dtype=np.float32) for share in (0.1, 0.9))
    for _ in range(SAMPLES):
        history.write(np.array([0, 1]), np.ones(2, dtype=int), np.stack([good, bad]), groups=groups)
    for samples in (1, 8):
        curves, _ = history.read(np.array([2, 3, 0]), np.ones(3, dtype=int), samples, np.array([7, 0, 0]))
        known = history.counts(np.array([2, 3, 0]), np.ones(3, dtype=int)) > 0
        assert known.tolist() == [False, False, True]
        assert curves[:, 0] == pytest.approx(np.tile(bad, (len(curves), 1)), abs=0.02)
        assert curves[:, 1:] == pytest.approx(np.full((len(curves), 2, GAMMA), 0.9), abs=0.02)
    for group in range(100, 100 + 2 * SAMPLES):
        history.read(np.array([2]), np.array([1]), 1, np.array([group]))
    assert len(history._pools) == SAMPLES


def test_a_late_write_of_the_former_request_does_not_leak():
    planner = uncorrected(curve_cost(1, CHEAP))
    old, new = (np.full((1, GAMMA), c, dtype=np.float32) for c in (0.99, 0.3))
    run(planner, view(1, GAMMA, generations=[1]), old, draft=True)
    run(planner, view(1, GAMMA, generations=[1]), old, draft=True)
    run(planner, view(1, GAMMA, generations=[2]), new, draft=True)  # planned before the last step of `old` is absorbed
    run(planner, view(1, GAMMA, generations=[2]), new, draft=True)
    run(planner, view(1, GAMMA, generations=[2]), new, draft=True)
    curves, _ = planner.history.read(np.array([0]), np.array([2]), 4)
    known = planner.history.counts(np.array([0]), np.array([2])) > 0
    curves = curves[:4]  # the next request's curves follow
    assert known.all()
    assert curves == pytest.approx(np.broadcast_to(new.cumprod(1), curves.shape), rel=1e-5)


def test_requests_without_speculation_leave_no_history():
    planner = uncorrected(curve_cost(2, CHEAP))
    for _ in range(4):
        run(planner, view(2, GAMMA, limits=[0, GAMMA]), LIKELY, draft=True)
    known = planner.history.counts(np.array([0, 1]), np.array([1, 1])) > 0
    assert known.tolist() == [False, True]
    assert not planner.budget(view(2, GAMMA, limits=[0, 0])).draft


def test_smoothing_takes_the_mean_of_the_curves():
    """If drafts are good every second time, the request gets one budget, not two that each lag a step."""
    cost = curve_cost(1, [1.0, 1.4, 1.8, 2.2])
    good, bad = (np.full((1, GAMMA), c, dtype=np.float32) for c in (0.95, 0.05))
    by_smoothing = {}
    for smoothing in (1, 64):
        planner = uncorrected(cost, smoothing=smoothing)
        budgets = [run(planner, view(1, GAMMA), (good, bad)[i % 2], draft=True) for i in range(80)]
        by_smoothing[smoothing] = set(budgets[60:])
    assert len(by_smoothing[1]) == 2
    assert len(by_smoothing[64]) == 1


def test_memory_does_not_grow_with_uptime():
    planner = Asynchronous(curve_cost(2, CHEAP), GAMMA)
    rng = np.random.default_rng(0)

    def live(steps: int) -> int:
        for i in range(steps):
            rows = rng.choice(100, 2, replace=False).tolist()
            run(planner, view(2, GAMMA, rows=rows, generations=[i + 1, i + 1]), LIKELY, accepted=2)
        return sum(kept.nbytes for kept in vars(planner.history).values() if isinstance(kept, np.ndarray))

    after_few = live(300)
    assert live(2000) == after_few
    assert after_few < 200 * (16 * GAMMA * 4 + 16) + 1
    assert len(planner._open) == 0
    assert len(planner._finished) <= 2


def test_overconfident_survivals_are_corrected_by_acceptance():
    """Confidences are 0.95, and a third survives."""
    cost = curve_cost(2, CHEAP, draft=0.1)
    rng = np.random.default_rng(0)
    sure = np.full((2, GAMMA), 0.95, dtype=np.float32)
    planner, trusting = Asynchronous(cost, GAMMA), uncorrected(cost)
    budgets = {}
    for name, each in (("corrected", planner), ("trusting", trusting)):
        budgets[name] = [
            run(each, view(2, GAMMA), sure, accepted=(rng.random((2, GAMMA)) < 0.3).cumprod(1).sum(1))
            for _ in range(400)
        ]
    assert budgets["trusting"][-1] == 2 * GAMMA
    assert sum(tokens or 0 for tokens in budgets["corrected"][-100:]) < 50 * 2 * GAMMA


def test_calibrated_confidences_stay_unchanged_whatever_is_verified():
    """Unverified positions are censored: a low budget must not look like rejection."""
    planner = Asynchronous(curve_cost(8, [1.0 + 0.001 * k for k in range(8 * 7 + 1)]), 7)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        confidence = rng.beta(4, 1, (8, 7)).astype(np.float32)
        survival = confidence.cumprod(1)
        accepted = (rng.random((8, 7)) < confidence).cumprod(1).sum(1)
        verify_lens = (survival > 0.4).sum(1)  # later positions are censored more often
        planner.correction.observe(survival, verify_lens, np.minimum(accepted, verify_lens) + 1)
    assert planner.correction.factor == pytest.approx(1.0, abs=0.02)


def test_requests_with_rules_have_a_correction_of_their_own():
    """A grammar rejects every draft of the first request."""

    def factors(ruled: list[bool] | None) -> tuple[float, float]:
        planner, rng = Asynchronous(curve_cost(2, [1.0] * 3), 1, held=1), np.random.default_rng(0)
        ones, asked = np.ones(2, dtype=np.int64), np.ones(2, dtype=bool)
        for _ in range(2000):
            step, survival = view(2, 1, ruled=ruled), np.full((2, 1), 0.75, dtype=np.float32)
            planner.budget(step)
            observe(planner, step, survival, ones, np.array([1, 1 + (rng.random() < 0.75)]), asked)
        return planner.correction.factor, planner.ruled_correction.factor

    plain, ruled = factors([True, False])
    assert plain == pytest.approx(1.0, abs=0.04)
    assert ruled < 0.1
    assert factors([True, True])[0] == 1.0
    assert factors([True, True])[1] == factors(None)[0] < 0.6


def test_each_request_is_admitted_by_its_own_correction():
    planner = Asynchronous(curve_cost(2, [1.0] * 5), 2)
    planner.ruled_correction.factor = 0.5
    planner.budget(view(2, 2, ruled=[True, False]))
    confidence = torch.tensor([[0.9, 0.8], [0.9, 0.8]])
    admitted = planner.admit(confidence, torch.tensor([2, 2]), Budget(draft=True, tokens=None, least=0.4))
    assert admitted.tolist() == [1, 2]  # survivals 0.45 and 0.36, 0.9 and 0.72


@pytest.mark.parametrize("requests", [1, 32])
@pytest.mark.parametrize("stated", [0.4, 0.9])
def test_a_drafter_whose_drafts_all_fail_rests_within_a_few_steps(requests, stated):
    """Afterwards it drafts little more than probes."""
    planner = Asynchronous(curve_cost(requests, [1.0 + 0.05 * k for k in range(requests * GAMMA + 1)], 0.2), GAMMA)
    confidence = np.full((requests, GAMMA), stated, dtype=np.float32)
    drafts = [run(planner, view(requests, GAMMA), confidence) is not None for _ in range(600)]
    assert sum(drafts[:50]) <= 30
    assert sum(drafts[300:]) <= 0.15 * 300


@pytest.mark.parametrize("smoothing", [1, 8])
def test_the_shown_curve_is_the_searched_one(smoothing):
    planner = uncorrected(curve_cost(2, [1.0 + 0.2 * k for k in range(2 * GAMMA + 1)]), smoothing=smoothing)
    assert planner.curve() is None
    step = view(2, GAMMA)
    confidence = np.array([[0.9, 0.8, 0.3]] * 2, dtype=np.float32)
    budgets = [run(planner, step, confidence, 2) for _ in range(40)]
    curve = planner.curve()
    assert curve.requests == 2
    assert curve.tokens[0] == 0
    assert (np.diff(curve.tokens) > 0).all()
    tokens, throughput = curve.chosen
    assert throughput == curve.throughput.max()
    assert curve.throughput[np.searchsorted(curve.tokens, tokens)] == throughput
    assert tokens == budgets[-1]


def test_without_drafting_the_curve_shows_the_expected_gain():
    planner = uncorrected(curve_cost(2, [1.0 + 3.0 * k for k in range(2 * GAMMA + 1)], draft=1.0))
    for _ in range(8):
        run(planner, view(2, GAMMA), np.full((2, GAMMA), 0.1, dtype=np.float32))
    curve = planner.curve()
    assert curve.chosen == (0.0, 2.0)
    assert len(curve.tokens) > 1
    assert (curve.throughput < 2.0).all()


def sorted_first(survival: np.ndarray, count: int) -> np.ndarray:
    """Reference of `largest_survivals`: sorts the floats, then rounds down."""
    ordered = np.sort(survival, axis=1)[:, ::-1][:, :count]
    return np.floor(ordered * np.float32(RESOLUTION)).astype(np.uint16)


@pytest.mark.parametrize("seed", range(50))
def test_largest_equals_its_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples, n = int(rng.integers(1, 6)), int(rng.integers(1, 300))
    count = int(rng.integers(0, n + 3))
    survival = rng.beta(5, 1, (samples, n)).astype(np.float32) * np.float32(rng.uniform(0, LARGEST))
    survival[rng.random((samples, n)) < 0.2] = 0.0  # not drafted
    survival[rng.random((samples, n)) < 0.2] = survival[0, 0]  # ties
    expected = sorted_first(survival, count)
    assert expected.shape == (samples, min(count, n))
    sorted_fast = largest_survivals(survival, count)
    assert sorted_fast.dtype == np.uint16
    assert np.array_equal(sorted_fast, expected)


def test_the_largest_correction_of_the_largest_survival_fits() -> None:
    most = np.full((1, 2), LARGEST, dtype=np.float32)
    assert largest_survivals(most.copy(), 2).tolist() == [[2**16 - 1] * 2]
