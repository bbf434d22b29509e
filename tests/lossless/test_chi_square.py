"""Tests the chi-square check of `test_sampled.py` on made-up outcomes."""

from collections import Counter

import numpy as np
import pytest
from chi_square import p_value

EVEN = dict.fromkeys("abcd", 0.25)


def drawn(probs: dict[str, float], total: int, seed: int = 0) -> Counter:
    counts = np.random.default_rng(seed).multinomial(total, list(probs.values()))
    return Counter(dict(zip(probs, counts.tolist(), strict=True)))


def test_the_right_distribution_passes_and_a_wrong_one_fails() -> None:
    probs = {"a": 0.5, "b": 0.2, "c": 0.15, "d": 0.1, "e": 0.04, "f": 0.006, "g": 0.004}
    p_values = [p_value(drawn(probs, 1000, seed), probs, 1000) for seed in range(400)]
    assert min(p_values) > 1e-4
    assert 0.4 < np.mean(p_values) < 0.6  # p-values of a correct hypothesis are uniform
    shifted = probs | {"a": 0.4, "b": 0.3}
    assert p_value(drawn(shifted, 1000), probs, 1000) < 1e-4


def test_no_rare_outcomes_at_all() -> None:
    """With top-k, the kept probabilities sum to 1 up to rounding."""
    for probs in (EVEN, EVEN | {"e": 0.0}, dict(zip("abcdef", [1 / 6] * 6, strict=True))):
        exact = Counter({key: round(p * 1200) for key, p in probs.items()})
        assert p_value(exact, probs, 1200) == pytest.approx(1.0)
    assert p_value(Counter(a=400, b=200, c=300, d=300), EVEN, 1200) < 1e-4


@pytest.mark.parametrize("probs", [EVEN | {"e": 0.0}, EVEN], ids=["of probability 0", "not known at all"])
def test_an_impossible_outcome_fails(probs: dict[str, float]) -> None:
    assert p_value(Counter(a=300, b=300, c=300, d=299, e=1), probs, 1200) == 0.0


def test_few_rare_outcomes_join_a_common_one() -> None:
    probs = {"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.099, "e": 0.001}
    assert p_value(Counter(a=400, b=300, c=200, d=99, e=1), probs, 1000) == pytest.approx(1.0)
    assert p_value(Counter(a=400, b=300, c=200, d=95, e=5), probs, 1000) > 0.9  # one class: 100 of 100
    assert p_value(Counter(a=380, b=280, c=190, d=70, e=80), probs, 1000) < 1e-4  # 150 of 100


def test_outcomes_without_an_entry_share_the_rest() -> None:
    probs = {"a": 0.4, "b": 0.3, "c": 0.1, "d": 0.1}
    assert p_value(Counter(a=400, b=300, c=100, d=100, x=60, y=40), probs, 1000) == pytest.approx(1.0)
    assert p_value(Counter(a=440, b=330, c=110, d=110, x=10), probs, 1000) < 1e-4
