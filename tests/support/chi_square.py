"""Chi-square of counted outcomes against their probabilities, and its power: the chance that it detects a fault."""

from collections import Counter
from collections.abc import Hashable, Mapping

import numpy as np
from scipy import stats

FEWEST = 16
"""Least expected count of a class, for the normal approximation."""


def p_value(counts: Counter, probs: Mapping[Hashable, float], total: int) -> float:
    """Chi-square of counted outcomes against their probabilities; 0 if an impossible one was counted.

    probs: the rest to 1 is for outcomes without an entry.
    """
    if any(n and not probs.get(key, possible_others(probs)) for key, n in counts.items()):
        return 0.0
    common = classes(probs, total)
    observed = [counts[key] for key in common]
    expected = [probs[key] * total for key in common]
    observed.append(total - sum(observed))
    expected.append(total - sum(expected))
    return float(stats.chisquare(observed, expected).pvalue)


def classes(probs: Mapping[Hashable, float], total: int) -> list[Hashable]:
    """Outcomes with classes of their own; the rest form one more.

    Outcomes expected less than FEWEST times join the rest; while that is too small, so does the least common outcome.
    """
    common = sorted((key for key, p in probs.items() if p * total >= FEWEST), key=probs.__getitem__, reverse=True)
    assert len(common) > 3
    if total * (1 - sum(probs[key] for key in common)) < FEWEST:
        common.pop()
    return common


def possible_others(probs: Mapping[Hashable, float]) -> bool:
    """Tell whether outcomes without an entry have a probability above rounding."""
    return 1 - sum(probs.values()) > 1e-9


THRESHOLD = 1e-4
"""A test fails if `p_value` is below this."""


def power(probs: Mapping[Hashable, float], wrong: Mapping[Hashable, float], total: int) -> float:
    """Chance that `total` outcomes distributed as `wrong` fail a test of `probs`.

    By the noncentral chi-square distribution, and the chance of an outcome that `probs` excludes. The rest of probs and
    wrong to 1 is for outcomes without an entry.
    """
    common = classes(probs, total)
    expected, faulty = ([each.get(key, 0.0) for key in common] for each in (probs, wrong))
    expected, faulty = (np.array([*each, 1 - sum(each)]) for each in (expected, faulty))
    noncentrality = total * float(((faulty - expected) ** 2 / expected).sum())
    seen = float(stats.ncx2.sf(stats.chi2.isf(THRESHOLD, len(common)), len(common), noncentrality))
    impossible = sum(p for key, p in wrong.items() if not probs.get(key, possible_others(probs)))
    return 1 - (1 - seen) * (1 - impossible) ** total


def simulated_power(
    probs: Mapping[Hashable, float], wrong: Mapping[Hashable, float], total: int, *, runs: int = 200, seed: int = 0
) -> float:
    """Share of `runs` tests that fail. wrong: sums to 1."""
    generator, keys = np.random.default_rng(seed), list(wrong)
    weights = np.array(list(wrong.values()))
    drawn = generator.multinomial(total, weights / weights.sum(), size=runs)
    return float(
        np.mean([p_value(Counter(dict(zip(keys, row, strict=True))), probs, total) < THRESHOLD for row in drawn])
    )


def distance(one: Mapping[Hashable, float], other: Mapping[Hashable, float]) -> float:
    """Total variation between two distributions that sum to 1."""
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other}) / 2
