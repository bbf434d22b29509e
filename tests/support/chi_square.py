"""Whether counted outcomes are distributed as they should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

from scipy import stats

FEWEST = 16
"""Expected counts of a class; fewer would not be near enough to normal."""


def p_value(counts: Counter, probs: Mapping[Hashable, float], total: int) -> float:
    """Chi-square of `total` counted outcomes against their probabilities; 0 where an impossible one was counted.

    probs: what they lack to 1 is the probability of all outcomes without an entry together.
    Outcomes expected fewer than FEWEST times form one class; where it is too small, the least common one joins it.
    """
    others = 1 - sum(probs.values())
    possible_others = others > 1e-9  # else it is what rounding left
    if any(n and not probs.get(key, possible_others) for key, n in counts.items()):
        return 0.0
    common = sorted((key for key, p in probs.items() if p * total >= FEWEST), key=probs.__getitem__, reverse=True)
    assert len(common) > 3
    if total * (1 - sum(probs[key] for key in common)) < FEWEST:
        common.pop()
    observed = [counts[key] for key in common]
    expected = [probs[key] * total for key in common]
    observed.append(total - sum(observed))
    expected.append(total - sum(expected))
    return float(stats.chisquare(observed, expected).pvalue)
