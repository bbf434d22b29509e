"""Tokens revealed by a denoising step, against plain loops; drawn blocks, against enumeration."""

from collections import Counter
from collections.abc import Mapping
from functools import partial

import pytest
import torch
from block_outcomes import enumerated
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


def revealed_one_by_one(policy: Policy, confidence: Mapping[int, float]) -> list[int]:
    """The places that a step reveals. confidence: of the masked ones."""
    ranked = sorted(confidence, key=lambda place: (-confidence[place], place))
    if isinstance(policy, Static):
        return ranked[: policy.tokens]
    assert isinstance(policy, ThresholdUnmasking)
    return [place for place in ranked if confidence[place] > policy.confidence] or ranked[:1]


@pytest.mark.parametrize("policy", POLICIES)
def test_reveals_the_same_as_a_plain_loop(policy: Policy) -> None:
    draw = torch.Generator().manual_seed(0)
    masked = torch.rand(500, 8, generator=draw) < 0.6
    confidence = torch.randint(0, 5, (500, 8), generator=draw) / 4
    revealed = policy.reveal(masked, confidence).tolist()
    for row, masks, sure in zip(revealed, masked.tolist(), confidence.tolist(), strict=True):
        expected = revealed_one_by_one(policy, {place: sure[place] for place in range(8) if masks[place]})
        assert [place for place in range(8) if row[place]] == sorted(expected)


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


def chances(state: tuple[int, ...], temperature: float, top_p: float) -> list[dict[int, float]]:
    """Return each token's chance, by position, by the reference's rules."""
    logits, every = model(torch.tensor([state]))[0].clone(), torch.ones(BLOCK)
    logits[:, MASK] = -torch.inf
    rows = reference_target_probs(logits, temperature * every, top_ps=top_p * every).double().tolist()
    return [{token: p for token, p in enumerate(row) if p > 0} for row in rows]


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
    of_state = partial(chances, temperature=temperature, top_p=top_p)
    expected = enumerated(of_state, partial(revealed_one_by_one, policy), (1, MASK, MASK), MASK)
    counts = Counter(map(tuple, states.tolist()))
    assert p_value(counts, expected, total) > 1e-4
