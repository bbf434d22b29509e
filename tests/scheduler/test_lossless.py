"""Appendix A's counterexample: our planners keep the distribution, a search that looks ahead does not.

One request, gamma 2, p = (0.7, 0.3) and q = (0.5, 0.5) at the first position, so c_1 = 0.8. The second confidence is
0.9 after x_1 = A and 0 after x_1 = B.

Then two such requests, of which the planner chooses for the model; the rest has a lookup, B and B, of confidence 0.3.
"""

import math
from collections.abc import Callable

import pytest
import torch
from finished import observe
from planning import curve_cost, view

from outrider.kernels.acceptance import Verification, accept
from outrider.kernels.drafts import survival_of
from outrider.scheduler.baselines import Synchronous, Threshold, VerifyAll
from outrider.scheduler.contract import Planner
from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.cost.step_times import Point
from outrider.scheduler.planner import Asynchronous

SAMPLES = 4000
A, B = 0, 1
P = torch.tensor([[0.7, 0.3], [0.4, 0.6], [0.5, 0.5]])  # after the anchor, after x_1, after x_2
Q = torch.tensor([[0.5, 0.5], [0.4, 0.6]])
APPENDIX = [1.0, 2.0, 1 / 0.45]  # seconds of SPS 1, 0.5, 0.45

Plan = Callable[[torch.Tensor], torch.Tensor]


def first_tokens(plan: Plan, seed: int = 0) -> tuple[float, dict[int, int]]:
    """Share of A among the first tokens of SAMPLES consecutive steps, and how often each length was verified.

    plan: verify_lens [1] from confidence [1, 2].
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = (torch.rand(SAMPLES, 2, generator=generator) >= Q[:, 0]).long()
    confidence = torch.stack([torch.full((SAMPLES,), 0.8), torch.where(tokens[:, 0] == A, 0.9, 0.0)], 1)
    verify_lens = torch.cat([plan(confidence[i : i + 1]) for i in range(SAMPLES)])
    firsts = accepted_firsts(tokens, verify_lens, Q.expand(SAMPLES, 2, 2), generator)
    return float((firsts == A).float().mean()), dict(enumerate(verify_lens.bincount(minlength=3).tolist()))


def accepted_firsts(
    drafts: torch.Tensor, verify_lens: torch.Tensor, q: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """The first token [N] that acceptance gives for each of N drafts [N, 2] drawn from q [N, 2, 2]."""
    count = len(drafts)
    batch = Verification(
        drafts, verify_lens, torch.cat([torch.zeros(1, dtype=torch.int64), (verify_lens + 1).cumsum(0)]),
        uniforms=torch.rand(count, 2, generator=generator, dtype=torch.float64),
        final_keys=torch.randint(2**62, (count,), generator=generator),
        probs=torch.cat([P[: n + 1] for n in verify_lens.tolist()]), draft_probs=q.contiguous(),
    )  # fmt: skip
    return accept(batch)[1][:, 0]


def steps_of(planner: Planner) -> Plan:
    def plan(confidence: torch.Tensor) -> torch.Tensor:
        step = view(1, 2)
        budget = planner.budget(step)
        verify_lens = torch.zeros(1, dtype=torch.int64)
        if budget.draft:
            verify_lens = planner.admit(confidence, torch.tensor([2]), budget)
        survival = survival_of(confidence).numpy()
        observe(
            planner, step, survival, verify_lens.numpy(), verify_lens.numpy() + 1, budget.draft_mask(step.limits), None
        )
        return verify_lens

    return plan


def naive(seconds: list[float]) -> Plan:
    """The global maximum of the current step's whole curve: lines 7 to 15 of Algorithm 1 without the break."""

    def plan(confidence: torch.Tensor) -> torch.Tensor:
        survival = survival_of(confidence)[0]
        throughput = torch.cat([torch.ones(1), 1 + survival.cumsum(0)]) / torch.tensor(seconds)
        return throughput.argmax(keepdim=True)

    return plan


def bound(share: float) -> float:
    """Five standard deviations; the bias of 0.15 is 20 of them."""
    return 5 * math.sqrt(share * (1 - share) / SAMPLES)


def asynchronous(seconds: list[float]) -> Asynchronous:
    return Asynchronous(curve_cost(1, seconds), 2, smoothing=1, held=1)


@pytest.mark.parametrize(
    ("planner", "lengths_seen"),
    [
        (Synchronous(curve_cost(1, APPENDIX)), {0}),
        (Synchronous(curve_cost(1, [1.0, 1.2, 2.0])), {1}),  # a_2 never pays
        (Synchronous(curve_cost(1, [1.0, 1.2, 1.6])), {1, 2}),
        (asynchronous(APPENDIX), {0, 1, 2}),
        (asynchronous([1.0, 1.2, 1.6]), {1, 2}),
    ],
)
def test_planners_keep_the_distribution(planner, lengths_seen):
    """Several lengths must occur: a constant planner is lossless for the wrong reason."""
    share, lengths = first_tokens(steps_of(planner))
    assert abs(share - 0.7) < bound(0.7)
    assert {length for length, count in lengths.items() if count > SAMPLES / 20} == lengths_seen


@pytest.mark.parametrize("planner", [VerifyAll(), Threshold(0.75)])
def test_baselines_keep_the_distribution(planner):
    share, _ = first_tokens(steps_of(planner))
    assert abs(share - 0.7) < bound(0.7)


def test_the_naive_search_is_detected():
    share, lengths = first_tokens(naive(APPENDIX))
    assert abs(share - 0.85) < bound(0.85)
    assert abs(share - 0.7) > 3 * bound(0.7)
    assert lengths[1] == 0
    assert lengths[0] > SAMPLES / 3
    assert lengths[2] > SAMPLES / 3


class Peeking(Asynchronous):
    """The same search over the current step."""

    def admit(self, confidence, draft_lens, budget):
        survival = survival_of(confidence)[0]
        throughput = torch.cat([torch.ones(1), 1 + survival.cumsum(0)]) / torch.from_numpy(budget.seconds)
        return throughput.argmax(keepdim=True) if budget.draft else torch.zeros(1, dtype=torch.int64)


def test_an_asynchronous_planner_that_peeks_is_detected():
    share, _ = first_tokens(steps_of(Peeking(curve_cost(1, APPENDIX), 2, smoothing=1)))
    assert share > 0.7 + bound(0.7)


# -- who drafts -------------------------------------------------------------------------------------------------------

Asks = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
LOOKUP = torch.tensor([0.3, 0.6])


def shares_of_two(asks: Asks, seed: int = 0) -> tuple[list[float], list[float]]:
    """Shares of two requests: of A among their first tokens, and of steps in which the model drafted for them.

    asks: (asked [2] bool, verify_lens [2]) from the model's drafts [2, 2] and their confidences.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = (torch.rand(SAMPLES, 2, 2, generator=generator) >= Q[:, 0]).long()
    confidence = torch.stack([torch.full((SAMPLES, 2), 0.8), torch.where(tokens[:, :, 0] == A, 0.9, 0.0)], 2)
    chosen = [asks(drafts, sure) for drafts, sure in zip(tokens, confidence, strict=True)]
    asked, verify_lens = torch.cat([a for a, _ in chosen]), torch.cat([n for _, n in chosen])
    drafts = torch.where(asked[:, None], tokens.flatten(0, 1), torch.full((2,), B))
    q = torch.where(asked[:, None, None], Q, torch.nn.functional.one_hot(torch.full((2,), B), 2).float())
    firsts = accepted_firsts(drafts, verify_lens, q, generator)
    return (firsts == A).float().view(-1, 2).mean(0).tolist(), asked.float().view(-1, 2).mean(0).tolist()


def asks_of(planner: Planner, looked: list[bool]) -> Asks:
    """looked: is appended whether each step looks up."""

    def asks(drafts: torch.Tensor, sure: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        step = view(2, 2)
        budget = planner.budget(step)
        looked.append(budget.look_up)
        asked = torch.from_numpy(budget.draft_mask(step.limits))
        confidence = torch.where(asked[:, None], sure, LOOKUP if budget.look_up else torch.zeros(2))
        verify_lens = planner.admit(confidence, torch.full((2,), 2 if budget.look_up else 0), budget)
        survival, looked_up = survival_of(confidence).numpy(), (~asked).numpy() if budget.look_up else None
        observe(planner, step, survival, verify_lens.numpy(), verify_lens.numpy() + 1, asked.numpy(), None, looked_up)
        return asked, verify_lens

    return asks


def drafting_is_dear(smoothing: int, each: float = 0.65) -> Asynchronous:
    """The model's drafts pay where both requests drew A two steps ago; probes must find out when they pay again."""
    drafts = [Point(n, 0, 0, (n * each,)) for n in (1, 2)]
    verify = [Point(2, 2 + k, 0, (1.0 + 0.1 * k,)) for k in range(5)]
    planner = Asynchronous(StepCost([*verify, *drafts]), 2, smoothing=smoothing, held=1)
    planner.probing.share = 1.0
    return planner


@pytest.mark.parametrize(("smoothing", "each"), [(1, 0.65), (4, 0.7)])
def test_whether_the_model_drafts_does_not_depend_on_the_draw(smoothing, each):
    """Earlier steps decide between the model's drafts, lookups and none."""
    shares, asked = shares_of_two(asks_of(drafting_is_dear(smoothing, each), []))
    assert all(abs(share - 0.7) < bound(0.7) for share in shares)
    assert all(0.04 < share < 0.96 for share in asked)


SHALLOW = torch.tensor([0.6, 0.4])
"""q of a draft of one token; a block of two has another q."""


def shares_by_depth(depths: Callable[[torch.Tensor, torch.Tensor], tuple[int, torch.Tensor]]) -> tuple[float, float]:
    """Share of A among the first tokens of one request, and of steps that drafted two tokens.

    depths: (tokens drafted, verify_lens [1]) from the draws of either block [2, 2] and its confidences [2, 2]; row 0 is
    the shallow one.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = (torch.rand(SAMPLES, 2, 2, generator=generator) >= torch.stack([SHALLOW, Q[0]])[:, :1]).long()
    deep = torch.stack([torch.full((SAMPLES,), 0.8), torch.where(tokens[:, 1, 0] == A, 0.9, 0.0)], 1)
    confidence = torch.stack([torch.tensor([0.9, 0.0]).expand(SAMPLES, 2), deep], 1)
    choices = [depths(drafts, sure) for drafts, sure in zip(tokens, confidence, strict=True)]
    chosen, verify_lens = torch.tensor([depth for depth, _ in choices]) - 1, torch.cat([n for _, n in choices])
    drafts = tokens[torch.arange(SAMPLES), chosen]
    firsts = accepted_firsts(drafts, verify_lens, torch.stack([torch.stack([SHALLOW, Q[1]]), Q])[chosen], generator)
    return float((firsts == A).float().mean()), float(chosen.float().mean())


def test_how_much_is_drafted_does_not_depend_on_the_draw():
    """Earlier draws decide between one token and two."""
    drafts = [Point(1, 0, 0, (0.05,)), Point(2, 0, 0, (0.1,))]
    verify = [Point(2, 2 + k, 0, (1.0 + 0.1 * k,)) for k in range(5)]
    planner = Asynchronous(StepCost([*verify, *drafts]), 2, smoothing=1, held=1)
    planner.block = 2

    def depths(drafts: torch.Tensor, sure: torch.Tensor) -> tuple[int, torch.Tensor]:
        step = view(2, 2)
        budget = planner.budget(step)
        assert budget.draft
        depth = budget.depth
        asked = budget.draft_mask(step.limits)
        confidence = sure[depth - 1].expand(2, 2).contiguous()
        lens = torch.from_numpy(depth * asked)
        verify_lens = planner.admit(confidence, lens, budget)
        survival = survival_of(confidence, lens).numpy()
        observe(planner, step, survival, verify_lens.numpy(), verify_lens.numpy() + 1, asked, None)
        return depth, verify_lens[:1]

    share, deep = shares_by_depth(depths)
    assert abs(share - 0.7) < bound(0.7)
    assert 0.1 < deep < 0.9


def test_a_depth_chosen_by_the_draw_is_detected():
    """After B in the deep block, the shallow one is used."""

    def depths(drafts: torch.Tensor, sure: torch.Tensor) -> tuple[int, torch.Tensor]:
        return (2 if drafts[1, 0] == A else 1), torch.tensor([1])

    share, _ = shares_by_depth(depths)
    assert abs(share - 0.85) < bound(0.85)


@pytest.mark.parametrize("deciding", [0.25, 0.4])
def test_rests_do_not_depend_on_the_draw(deciding):
    """Some rests end by a probe, some because a draft paid."""
    planner = drafting_is_dear(1)
    planner.cost.observe_deciding(2, deciding)
    looked: list[bool] = []
    shares, _ = shares_of_two(asks_of(planner, looked))
    assert all(abs(share - 0.7) < bound(0.7) for share in shares)
    assert 0.05 < sum(looked) / SAMPLES < 0.95


TWO = torch.tensor([True, True])
DRAWN: dict[str, Asks] = {
    "after B the request rests": lambda drafts, sure: (TWO, torch.where(drafts[:, 0] == A, 1, 0)),
    "after B a lookup rated as equally good": lambda drafts, sure: (drafts[:, 0] == A, torch.tensor([1, 1])),
    "no draft that is unsure at its end": lambda drafts, sure: (TWO, torch.where(sure[:, 1] > 0, 2, 0)),
}


@pytest.mark.parametrize("asks", DRAWN.values(), ids=DRAWN)
def test_a_choice_by_the_draw_is_detected(asks: Asks) -> None:
    """The rest of a request, its source, and whether it is verified at all."""
    shares, _ = shares_of_two(asks)
    assert all(abs(share - 0.85) < bound(0.85) for share in shares)
