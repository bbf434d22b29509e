"""Tokens revealed by a denoising step, against plain loops; drawn blocks, against enumeration."""

from collections import Counter
from itertools import product

import pytest
import torch
from chi_square import p_value
from references import reference_target_probs

from outrider.kernels.sampling import Rules
from outrider.server.plugin.diffusion.policy import (
    Policy,
    Static,
    ThresholdUnmasking,
    noise_keys,
    predict,
    step,
    steps_of,
)

MASK, VOCAB, BLOCK = 5, 6, 3
POLICIES = [Static(1), Static(2), ThresholdUnmasking(0.6), ThresholdUnmasking(0.0), ThresholdUnmasking(1.0)]


def revealed_one_by_one(policy: Policy, masked: list[bool], confidence: list[float]) -> list[bool]:
    ranked = sorted((i for i in range(len(masked)) if masked[i]), key=lambda i: (-confidence[i], i))
    if isinstance(policy, Static):
        chosen = ranked[: policy.tokens]
    else:
        assert isinstance(policy, ThresholdUnmasking)
        chosen = [i for i in ranked if confidence[i] > policy.confidence] or ranked[:1]
    return [i in chosen for i in range(len(masked))]


@pytest.mark.parametrize("policy", POLICIES)
def test_reveals_the_same_as_a_plain_loop(policy: Policy) -> None:
    draw = torch.Generator().manual_seed(0)
    masked = torch.rand(500, 8, generator=draw) < 0.6
    confidence = torch.randint(0, 5, (500, 8), generator=draw) / 4
    revealed = policy.reveal(masked, confidence).tolist()
    expected = [revealed_one_by_one(policy, *row) for row in zip(masked.tolist(), confidence.tolist(), strict=True)]
    assert revealed == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_reveals_tokens_and_keeps_the_rest(policy: Policy) -> None:
    draw = torch.Generator().manual_seed(1)
    states = torch.randint(0, VOCAB, (300, 5), generator=draw)
    tokens = torch.randint(0, MASK, (300, 5), generator=draw)
    after = step(policy, states, tokens, torch.rand(300, 5, generator=draw), MASK)
    changed = after != states
    assert torch.equal(after[changed], tokens[changed])
    assert bool((states[changed] == MASK).all())
    assert torch.equal(changed.any(1), (states == MASK).any(1))


def test_greedy_is_the_best_token_but_the_mask_with_its_own_probability() -> None:
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(2)) * 3
    logits[:20, 7] = 99.0
    rules = Rules(torch.zeros(200))
    tokens, confidence = predict(logits.clone(), rules, torch.zeros(200, dtype=torch.int64), 7)
    banned = logits.clone()
    banned[:, 7] = -torch.inf
    assert torch.equal(tokens, banned.argmax(1))
    torch.testing.assert_close(confidence, logits.softmax(1).gather(1, tokens[:, None])[:, 0])


def test_rules_and_temperatures_of_a_batch_do_not_mix() -> None:
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 30, generator=draw) * 2
    rules = Rules(
        torch.rand(40, generator=draw).where(torch.rand(40, generator=draw) < 0.6, 0.0),
        torch.randint(1, 31, (40,), generator=draw),
        torch.rand(40, generator=draw),
        torch.rand(40, generator=draw) / 4,
    )
    keys = torch.randint(-(2**62), 2**62, (40,), generator=draw)
    together = predict(logits.clone(), rules, keys, 5)
    for i in range(40):
        at = torch.tensor([i])
        alone = predict(logits[at].clone(), rules.of(at), keys[at], 5)
        assert [x.tolist() for x in alone] == [x[at].tolist() for x in together]


def rules_of(count: int, temperature: float, top_p: float) -> Rules:
    return Rules(torch.full((count,), temperature), top_ps=torch.full((count,), top_p))


def model(states: torch.Tensor) -> torch.Tensor:
    """[N, B, V] logits: an arbitrary function of the state."""
    weights = torch.randn((VOCAB**BLOCK, BLOCK, VOCAB), generator=torch.Generator().manual_seed(4))
    return weights[(states * VOCAB ** torch.arange(BLOCK)).sum(1)]


def enumerated(policy: Policy, state: tuple[int, ...], temperature: float, top_p: float) -> Counter:
    """Probabilities of the finished blocks reached from a state."""
    masked = [i for i in range(BLOCK) if state[i] == MASK]
    if not masked:
        return Counter({state: 1.0})
    logits = model(torch.tensor([state]))[0].clone()
    logits[:, MASK] = -torch.inf
    probs = reference_target_probs(
        logits, torch.full((BLOCK,), temperature), torch.full((BLOCK,), VOCAB), torch.full((BLOCK,), top_p),
        torch.zeros(BLOCK),
    ).double()  # fmt: skip
    outcomes: Counter = Counter()
    for tokens in product(range(MASK), repeat=len(masked)):
        drawn = dict(zip(masked, tokens, strict=True))
        confidence = [float(probs[i, drawn[i]]) if i in drawn else 0.0 for i in range(BLOCK)]
        chance = 1.0
        for i in masked:
            chance *= confidence[i]
        if not chance:
            continue
        shown = revealed_one_by_one(policy, [i in drawn for i in range(BLOCK)], confidence)
        after = tuple(drawn[i] if shown[i] else state[i] for i in range(BLOCK))
        for block, p in enumerated(policy, after, temperature, top_p).items():
            outcomes[block] += chance * p
    return outcomes


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9)])
@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_are_distributed_as_enumerated(policy: Policy, temperature: float, top_p: float) -> None:
    total = 40_000
    states = torch.full((total, BLOCK), MASK)
    states[:, 0] = 1
    seeds, positions = torch.arange(total), torch.arange(8, 8 + BLOCK).expand(total, BLOCK)
    while bool((states == MASK).any()):
        steps = steps_of(states, MASK)[:, None].expand(total, BLOCK)
        keys = noise_keys(
            *(x.reshape(-1).contiguous() for x in (seeds[:, None].expand(total, BLOCK), positions, steps))
        )
        logits = model(states).flatten(0, 1)
        tokens, confidence = predict(logits, rules_of(len(logits), temperature, top_p), keys, MASK)
        states = step(policy, states, tokens.view(total, BLOCK), confidence.view(total, BLOCK), MASK)
    expected = enumerated(policy, (1, MASK, MASK), temperature, top_p)
    counts = Counter(map(tuple, states.tolist()))
    assert p_value(counts, expected, total) > 1e-4
