from collections import Counter
from collections.abc import Hashable, Mapping

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
