"""Spiffy decodes a block as base decoding does, in fewer forwards; a wrong acceptance is detected."""

import itertools
from collections import Counter

import denoising
import numpy as np
import pytest
from chi_square import p_value
from denoising import MASK, Decoded, Denoiser, Policy, base_decode, calibrated, candidates, denoiser, static, threshold

from outrider.scheduler.spiffy.fill import Candidates
from outrider.scheduler.spiffy.graph import DraftGraph

VOCABULARY, KEPT = 12, 3
POLICIES = {"static": static, "threshold": threshold}


def spiffy(
    denoise: Denoiser, policy: Policy, block: np.ndarray, graph: DraftGraph, budget: int, seed: int | None
) -> Decoded:
    def rank(distribution: np.ndarray, state: np.ndarray) -> Candidates:
        return candidates(distribution, state, seed, KEPT)

    return denoising.spiffy_decode(denoise, policy, block, MASK, graph=graph, budget=budget, rank=rank)


def started(size: int, shown: int) -> np.ndarray:
    return np.array([1 + i % 5 for i in range(shown)] + [MASK] * (size - shown))


def compared(policy: str, amount: float, size: int, seed: int | None, budgets: list[int]) -> list[int]:
    """Forwards by budget over blocks with several beginnings; asserts that all follow base decoding.

    A complete block that was in no forward takes one more, for its keys and values.
    """
    forwards = [0] * len(budgets)
    make, step_tokens = POLICIES[policy], int(amount) if policy == "static" else None
    for model in range(-(-16 // size)):
        denoise = denoiser(size, VOCABULARY, unrest=0.3, seed=model)
        graph = calibrated(denoise, make(amount), size, step_tokens=step_tokens)
        for shown in range(0, size, -(-size // 8)):
            request_seed = None if seed is None else seed + shown
            base = base_decode(denoise, make(amount, request_seed), started(size, shown), MASK)
            for place, budget in enumerate(budgets):
                fast = spiffy(denoise, make(amount, request_seed), started(size, shown), graph, budget, request_seed)
                assert np.array_equal(base.states, fast.states)
                assert fast.forwards + fast.accepted - fast.committed == base.forwards
                forwards[place] += fast.forwards + (not fast.committed)
    return forwards


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("size", [4, 32])
@pytest.mark.parametrize(("policy", "amount"), [("static", 1), ("static", 2), ("threshold", 0.4), ("threshold", 0.9)])
def test_the_trajectory_equals_base_decoding(policy, amount, size, seed):
    without, one, three, all_drafted = compared(policy, amount, size, seed, [0, 1, 3, 10])
    assert all_drafted < without
    assert max(one, three) <= without


def test_drafts_of_a_quiet_denoiser_are_all_accepted():
    size = 8
    denoise, step = denoiser(size, VOCABULARY, unrest=0.0), static(1)
    graph = calibrated(denoise, step, size, step_tokens=1)
    fast = spiffy(denoise, step, started(size, 0), graph, len(graph), None)
    assert fast.forwards == 2  # the second forward has all states; the graph is a chain


@pytest.mark.parametrize(
    "broken",
    [
        lambda root, drafts, stepped, mask: [0] if len(drafts) else [],  # accepts the first draft without a check
        lambda root, drafts, stepped, mask: [n for n, d in enumerate(drafts) if (d == root).sum() >= len(d) - 1][:1],
    ],
    ids=["first draft", "all but one token"],
)
def test_a_wrong_acceptance_is_detected(broken, monkeypatch):
    monkeypatch.setattr(denoising, "follow", broken)
    with pytest.raises(AssertionError):
        compared("static", 1, 8, 7, [3])
    with pytest.raises(AssertionError):
        compared("threshold", 0.4, 8, 7, [3])


def test_sampled_blocks_follow_the_base_policys_distribution():
    """Each block has a seed, at temperature 1."""
    size, vocabulary, samples = 2, 4, 1200
    denoise = denoiser(size, vocabulary, unrest=0.5, firmness=0.5)
    graph = calibrated(denoise, static(1), size, step_tokens=1)
    expected = exact(denoise, np.full(size, MASK))
    outcomes: Counter[tuple[int, ...]] = Counter()
    for seed in range(samples):
        fast = spiffy(denoise, static(1, seed), np.full(size, MASK), graph, 3, seed)
        outcomes[tuple(fast.states[-1].tolist())] += 1
    assert p_value(outcomes, expected, samples) > 1e-4


def exact(denoise: Denoiser, state: np.ndarray) -> dict[tuple[int, ...], float]:
    """Probability of every complete block under static(1), one token revealed per step."""
    if not (state == MASK).any():
        return {tuple(state.tolist()): 1.0}
    distribution, result = denoise(state[None])[0], {}
    tokens = range(1, distribution.shape[1])
    for drawn in itertools.product(*(tokens if token == MASK else [token] for token in state)):
        confidence = np.array([distribution[i, t] if state[i] == MASK else -1 for i, t in enumerate(drawn)])
        chance = np.prod(confidence[state == MASK])
        after = state.copy()
        after[confidence.argmax()] = drawn[confidence.argmax()]
        for block, further in exact(denoise, after).items():
            result[block] = result.get(block, 0.0) + chance * further
    return result
