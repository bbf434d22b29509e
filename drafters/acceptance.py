"""Accepted length tau and conditional acceptance by position: counting and tables.

tau includes the bonus token. A position that was not verified counts neither as tried nor as kept, so scheduled
verification does not look like rejection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts over verification steps.

    cycles: number of steps. tokens: tokens they yielded, including the bonus token.
    tried: [gamma] how often position k was verified with all positions before it accepted.
    kept: [gamma] how often it was then accepted.
    """

    cycles: int
    tokens: int
    tried: tuple[int, ...]
    kept: tuple[int, ...]

    @classmethod
    def empty(cls, gamma: int) -> Acceptance:
        return cls(0, 0, (0,) * gamma, (0,) * gamma)

    @classmethod
    def from_steps(cls, verified: Iterable[int], accepted: Iterable[int], gamma: int) -> Acceptance:
        """Count steps, given how many draft tokens each verified and accepted."""
        tried, kept, cycles, tokens = [0] * gamma, [0] * gamma, 0, 0
        for length, run in zip(verified, accepted, strict=True):
            if not 0 <= run <= length <= gamma:
                raise ValueError(f"expected 0 <= accepted <= verified <= {gamma}, got {run} of {length}")
            cycles += 1
            tokens += run + 1
            for k in range(min(run + 1, length)):
                tried[k] += 1
                kept[k] += k < run
        return cls(cycles, tokens, tuple(tried), tuple(kept))

    @property
    def accepted_length(self) -> float:
        """tau; 0 without steps."""
        return self.tokens / self.cycles if self.cycles else 0.0

    @property
    def conditional(self) -> list[float | None]:
        """Acceptance of position k given that all before it were accepted; None where never observed."""
        return [k / t if t else None for k, t in zip(self.kept, self.tried, strict=True)]

    def counts(self) -> dict[str, Any]:
        """Return the JSON form: tau, and the counts that `outrider simulate --acceptance` reads."""
        return {"tau": self.accepted_length, "tried": self.tried, "kept": self.kept}

    def __add__(self, other: Acceptance) -> Acceptance:
        if len(self.tried) != len(other.tried):
            raise ValueError(f"cannot add counts of gamma {len(self.tried)} and {len(other.tried)}")
        return Acceptance(
            self.cycles + other.cycles,
            self.tokens + other.tokens,
            tuple(a + b for a, b in zip(self.tried, other.tried, strict=True)),
            tuple(a + b for a, b in zip(self.kept, other.kept, strict=True)),
        )

    def __sub__(self, before: Acceptance) -> Acceptance:
        """Return the steps since `before`, an earlier reading of the same counters."""
        tried, kept = (tuple(-count for count in counts) for counts in (before.tried, before.kept))
        return self + Acceptance(-before.cycles, -before.tokens, tried, kept)


def acceptance_table(acceptances: Mapping[str, Acceptance]) -> str:
    """Return a Markdown table with one row per name: tau, steps, conditional acceptance by position."""
    gamma = max((len(a.tried) for a in acceptances.values()), default=0)
    lines = ["| | tau | steps | " + " | ".join(map(str, range(1, gamma + 1))) + " |", "|---" * (gamma + 3) + "|"]
    for name, a in acceptances.items():
        cells = ["-" if c is None else f"{c:.2f}" for c in a.conditional]
        cells += [""] * (gamma - len(cells))
        lines.append(f"| {name} | {a.accepted_length:.2f} | {a.cycles} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
