"""For which requests the model drafts: undrafted steps, probes, and lookups."""

import numpy as np
import pytest
import torch
from finished import CHEAP, GAMMA, UNLIKELY, observe, run, uncorrected
from planning import curve_cost, view

from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.cost.step_times import Point
from outrider.scheduler.planner import Asynchronous
from outrider.scheduler.probing import SHARE

DEAR = [1.0 + 0.5 * k for k in range(2 * GAMMA + 1)]


def test_without_gain_steps_run_without_drafting_and_probes_cost_a_hundredth():
    cost = curve_cost(2, DEAR, draft=0.4)
    planner = Asynchronous(cost, GAMMA)
    for _ in range(20):
        run(planner, view(2, GAMMA), UNLIKELY)
    drafted, spent, steps = 0, 0.0, 4000
    for _ in range(steps):
        step = view(2, GAMMA)
        budget = planner.budget(step)
        if budget.draft:
            drafted += 1
            assert budget.probe
            spent += budget.predicted_seconds(0) - 1.0
        verify_lens = np.zeros(2, dtype=np.int64)
        observe(planner, step, UNLIKELY.cumprod(1), verify_lens, verify_lens + 1, budget.draft_mask(step.limits), None)
    assert drafted > 10
    assert spent <= 0.0101 * steps


def test_probes_notice_that_drafting_pays_again():
    planner = Asynchronous(curve_cost(2, CHEAP, draft=0.4), GAMMA)
    bad = np.full((2, GAMMA), 0.05, dtype=np.float32)
    for _ in range(300):
        run(planner, view(2, GAMMA), bad)
    assert run(planner, view(2, GAMMA), bad) is None
    good = np.full((2, GAMMA), 0.99, dtype=np.float32)
    budgets = [run(planner, view(2, GAMMA), good, accepted=GAMMA) for _ in range(400)]
    assert all(tokens == 2 * GAMMA for tokens in budgets[-100:])


def dear_drafts(requests: int, each: float, token: float = 0.02) -> StepCost:
    """A draft takes `each` seconds per request, a verified token `token`, and a step without either one second."""
    verify = [Point(requests, requests + k, 0, (1.0 + token * k,)) for k in range(requests * GAMMA + 1)]
    return StepCost([*verify, *(Point(n, 0, 0, (each * n,)) for n in range(1, requests + 1))])


def seen(planner: Asynchronous, confidence: np.ndarray, steps: int = 20) -> None:
    """Plan and observe steps with this outcome."""
    for _ in range(steps):
        run(planner, view(len(confidence), GAMMA), confidence, draft=True)


@pytest.mark.parametrize("seed", range(20))
def test_the_chosen_number_of_drafted_tokens_is_the_best(seed):
    rng = np.random.default_rng(seed)
    requests, each, token = 4, float(rng.uniform(0.05, 0.3)), float(rng.uniform(0.02, 0.2))
    planner = uncorrected(dear_drafts(requests, each, token))
    planner.block = GAMMA
    confidence = rng.beta(2, rng.uniform(0.3, 4), (requests, 1)) * np.ones((1, GAMMA))
    seen(planner, confidence.astype(np.float32))
    budget = planner.budget(view(requests, GAMMA))

    def throughput(depth: int) -> float:
        survival = np.sort(confidence.cumprod(1)[:, :depth].ravel())[::-1]
        tokens = requests + np.append(0.0, survival.cumsum())
        drafting = max(each, each * requests * depth / GAMMA) if depth else 0.0
        return float((tokens / (1.0 + token * np.arange(len(tokens)) + drafting)).max())

    chosen = (budget.depth or GAMMA) if budget.draft and not budget.probe else 0
    assert throughput(chosen) >= 0.995 * max(throughput(depth) for depth in range(GAMMA + 1))


def test_undrafted_positions_are_assumed_to_decay_as_in_whole_drafts():
    """Shallow drafts do not hide that deeper ones would pay."""
    planner = uncorrected(dear_drafts(2, 0.3))
    planner.block = GAMMA
    likely = np.full((2, GAMMA), 0.8, dtype=np.float32)
    seen(planner, likely)
    rows, generations = np.arange(2), np.ones(2, dtype=np.int64)
    whole, _ = planner.history.read(rows, generations, 1)
    planner.history.write(rows + 8, generations, whole[0])
    shallow = whole[0].copy()
    shallow[:, 1:] = 0.0
    assert planner.history.extrapolated(shallow, 1, GAMMA) == pytest.approx(whole[0], rel=0.01)
    deeper = np.array([[0.9, 0.0, 0.0], [0.9, 0.8, 0.7]], dtype=np.float32)
    assert planner.history.extrapolated(deeper, 1, GAMMA)[1].tolist() == deeper[1].tolist()


@pytest.mark.parametrize("on_host", [True, False])
def test_a_draft_costs_where_the_model_makes_it(on_host):
    """Prompt lookup is unsure in one of five steps. On a CPU the model drafts only in these, which pays; on a GPU it
    would draft in all, which does not."""
    planner = uncorrected(dear_drafts(2, 0.2), smoothing=64)
    survival, everybody = np.full((2, GAMMA), 0.9, dtype=np.float32).cumprod(1), np.ones(2, dtype=bool)
    for i in range(120):
        step, sure = view(2, GAMMA), np.full(2, i % 5 != 0)
        planner.budget(step)
        drafted = int((~sure).sum()) if on_host else 2
        observe(planner, step, survival, np.zeros(2, int), np.ones(2, int), everybody, None, sure, drafted)
    budget = planner.budget(view(2, GAMMA))
    assert (budget.draft and not budget.probe) == on_host


def test_after_a_hard_passage_a_text_is_expected_to_become_easier():
    """Earlier texts became easier; where all texts are hard, the planner does not expect it."""
    easy, hard = (np.full((1, GAMMA), c, dtype=np.float32) for c in (0.9, 0.1))

    def drafts(others: np.ndarray) -> bool:
        planner = uncorrected(dear_drafts(1, 0.3), smoothing=64)
        for generation in range(1, 21):
            for _ in range(10):
                run(planner, view(1, GAMMA, generations=[generation]), others, draft=True)
        for _ in range(16):
            run(planner, view(1, GAMMA, generations=[100]), hard, draft=True)
        budget = planner.budget(view(1, GAMMA, generations=[100]))
        return budget.draft and not budget.probe

    assert drafts(easy)
    assert not drafts(hard)


def test_lookups_are_verified_though_no_model_drafts():
    planner = uncorrected(dear_drafts(2, 5.0))
    nobody, likely = np.zeros(2, dtype=bool), np.array([[0.9] * GAMMA, [0.01] * GAMMA]).cumprod(1)
    for _ in range(20):
        step = view(2, GAMMA)
        planner.budget(step)
        observe(planner, step, likely, np.zeros(2, int), np.ones(2, int), nobody, None, ~nobody)
    budget = planner.budget(view(2, GAMMA))
    assert not budget.draft
    confidences = torch.tensor([[0.99] * GAMMA, [0.01] * GAMMA])
    assert planner.admit(confidences, torch.tensor([GAMMA, GAMMA]), budget).tolist() == [GAMMA, 0]


def test_a_probe_costs_the_lookups_that_it_does_not_verify():
    """Where lookups bring four tokens a step, a probe loses three quarters of one, though drafts take a hundredth."""
    cost = curve_cost(1, [1.0 + 0.02 * k for k in range(GAMMA + 1)], draft=0.01)
    planner, all_looked_up, probes, steps = Asynchronous(cost, GAMMA), np.ones(1, dtype=bool), 0, 2000
    likely = np.full((1, GAMMA), 0.99, dtype=np.float32)
    for _ in range(steps):
        step = view(1, GAMMA)
        budget = planner.budget(step)
        verify_lens = planner.admit(torch.from_numpy(likely), torch.tensor([GAMMA]), budget).numpy()
        probes += budget.probe
        asked = np.zeros(1, dtype=bool)  # lookups are sure, so the model does not draft
        observe(planner, step, likely.cumprod(1), verify_lens, verify_lens + 1, asked, None, all_looked_up)
    assert 0 < 0.75 * probes <= 1.1 * SHARE * steps


def test_a_good_draft_of_a_lone_request_is_verified_further_than_a_bad_one():
    planner = uncorrected(curve_cost(1, [1.0 + 0.25 * k for k in range(GAMMA + 1)]), smoothing=64)
    good, bad = (np.full((1, GAMMA), c, dtype=np.float32) for c in (0.95, 0.4))
    for i in range(40):
        run(planner, view(1, GAMMA), (good, bad)[i % 2], draft=True)
    budget = planner.budget(view(1, GAMMA))
    lens = [int(planner.admit(torch.from_numpy(c), torch.tensor([GAMMA]), budget)) for c in (good, bad)]
    assert lens == [GAMMA, 0]


def test_a_budget_by_survival_stays_before_a_cliff():
    """When both requests' drafts are good at once, more tokens than ever would take far too long."""
    planner = uncorrected(curve_cost(2, [1.0, 1.05, 1.1, *[50.0] * 4]), smoothing=64)
    good, bad = ([c] * GAMMA for c in (0.95, 0.01))
    for i in range(40):
        run(planner, view(2, GAMMA), np.array((good, bad) if i % 2 else (bad, good), dtype=np.float32), draft=True)
    budget = planner.budget(view(2, GAMMA))
    both = torch.tensor([good, good])
    assert int(planner.admit(both, torch.tensor([GAMMA, GAMMA]), budget).sum()) <= 2


class Looking:
    """Steps of requests with lookups of this `confidence`; a lookup takes the host a twentieth of a step."""

    def __init__(self, requests: int):
        self.cost, self.probe_seconds = dear_drafts(requests, 0.2, token=0.05), 0.2 * requests + 0.05
        self.cost.observe_deciding(requests, 0.05)
        self.planner = Asynchronous(self.cost, GAMMA)
        self.requests = requests

    def run(self, confidence: float, steps: int, generation: int = 1) -> list[bool]:
        looked = []
        for _ in range(steps):
            step = view(self.requests, GAMMA, generations=[generation] * self.requests)
            budget = self.planner.budget(step)
            looked.append(budget.look_up)
            survival = np.full((self.requests, GAMMA), confidence if budget.look_up else 0.0, dtype=np.float32)
            lens = torch.full((self.requests,), GAMMA if budget.look_up else 0)
            verify_lens = self.planner.admit(torch.from_numpy(survival), lens, budget).numpy()
            looked_up = np.ones(self.requests, dtype=bool) if budget.look_up else None
            asked = budget.draft_mask(step.limits)
            observe(self.planner, step, survival.cumprod(1), verify_lens, verify_lens + 1, asked, None, looked_up)
        return looked


def test_where_lookups_do_not_pay_probes_take_a_hundredth_of_the_time():
    looking = Looking(8)
    assert any(looking.run(0.1, 10))
    looked = looking.run(0.1, 3000)
    assert 0 < looking.probe_seconds * sum(looked) <= 1.01 * SHARE * 3000


def test_a_probe_notices_that_lookups_pay_again():
    looking = Looking(8)
    looking.run(0.1, 1000)
    looked = looking.run(0.99, 500)
    assert not all(looked[:2])
    assert all(looked[-40:])


def test_a_drafter_that_cannot_look_up_rests_as_well():
    planner = Asynchronous(curve_cost(2, DEAR, draft=0.4), GAMMA)
    for _ in range(20):
        run(planner, view(2, GAMMA), UNLIKELY)
    decided = []
    for _ in range(100):
        before = planner._last
        run(planner, view(2, GAMMA), UNLIKELY)
        decided.append(planner._last is not before)
    assert sum(decided) < 20
