"""Appendix A's counterexample: our planners keep the distribution, a search that looks ahead does not.

One request, gamma 2, p = (0.7, 0.3) and q = (0.5, 0.5) at the first position, so c_1 = 0.8. The second confidence is
0.9 after x_1 = A and 0 after x_1 = B.

test_every_outcome.py enumerates the worker's steps, by costs for which looking ahead is no fault.
"""

import math
from collections.abc import Callable

import pytest
import torch
from finished import observe
from planning import curve_cost, view

from outrider.kernels.acceptance import Verification, accept
from outrider.kernels.drafts import survival_of
from outrider.scheduler.baselines import Synchronous
from outrider.scheduler.contract import Planner
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
