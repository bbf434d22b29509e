"""The gate: a candidate is taken only if it drafts better than the drafter in use on answers neither was trained on.

Both follow the same answers teacher-forced, greedily (`training/validate.py`). Answers are paired, and resampled by
prompt (a paired cluster bootstrap: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13), so that
one prompt asked often is one observation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np
import torch

from ..training.batches import BatchMaker, Step
from ..training.store import Sequence
from ..training.validate import Drafts, runs_along, steps_along

RESAMPLES = 2000
LEAST_PROMPTS, LEAST_TOKENS, FEWEST_PROMPTS = 8, 400, 6
"""Held-out prompts that a verdict needs; with so many answer tokens the fewest are enough."""
GENERAL_KEPT = 0.98
"""Smallest tau on general answers, relative to the drafter in use and to the one the server started with."""
FIRST_TAU = 1.3
"""Smallest tau of the first drafter, where none is in use."""


@dataclass(frozen=True, slots=True)
class Followed:
    """Decoding along one answer of `tokens` tokens, teacher-forced, in N steps.

    confidence: [N, gamma] float32, raw; reach: [N] int64, draft tokens that the answer verifies; accepted: [N] int64.
    """

    tokens: int
    confidence: np.ndarray
    accepted: np.ndarray
    reach: np.ndarray

    @property
    def steps(self) -> int:
        return len(self.accepted)


def tau(answers: Iterable[Followed]) -> float:
    """Tokens a step over several answers; 1 without answers."""
    answers = list(answers)
    return sum(a.tokens for a in answers) / sum(a.steps for a in answers) if answers else 1.0


@torch.inference_mode()
def follow(drafts: Drafts, maker: BatchMaker, sequences: Iterable[Sequence]) -> list[Followed]:
    """Follow each answer with a drafter; maker: cuts steps for it."""
    found = []
    for s in sequences:
        sure: list[torch.Tensor] = []

        def hits(step: Step, sure: list[torch.Tensor] = sure) -> torch.Tensor:
            tokens, confidence = drafts(step)
            sure.append(confidence.float().cpu())
            return tokens == step.tokens[:, 1:]

        runs = runs_along(maker, s, hits)
        places, reach, accepted = steps_along(runs, len(runs), maker.config.gamma)
        confidence = torch.cat(sure)[places].numpy()
        found.append(Followed(len(runs), confidence, np.array(accepted, np.int64), np.array(reach, np.int64)))
    return found


@dataclass(frozen=True, slots=True)
class Verdict:
    """A comparison of a candidate with the drafter in use.

    ratio: tau of the candidate over that in use on held-out answers; low, high: its 95 % interval.
    reason: why the candidate was refused; "" if it passed.
    """

    reason: str
    prompts: int
    tokens: int
    candidate_tau: float
    in_use_tau: float
    ratio: float
    low: float
    high: float
    candidate_general: float
    in_use_general: float

    @property
    def passed(self) -> bool:
        return not self.reason

    def numbers(self) -> dict[str, object]:
        """The fields for people and files, with four digits behind the point."""
        return {name: round(v, 4) if isinstance(v, float) else v for name, v in asdict(self).items()}


def enough(prompts: int, tokens: int) -> bool:
    """True if so many held-out prompts, with so many answer tokens, allow a verdict."""
    return prompts >= LEAST_PROMPTS or (prompts >= FEWEST_PROMPTS and tokens >= LEAST_TOKENS)


def compare(
    candidate: list[Followed], in_use: list[Followed] | None, prompts: list[str], candidate_general: list[Followed],
    in_use_general: list[Followed] | None, first_general: float = 0.0,
) -> Verdict:  # fmt: skip
    """Judge a candidate on the answers that both followed, in the same order; prompts: each answer's.

    None in use: the candidate is compared with one token a step, and has to reach `FIRST_TAU`.
    first_general: tau on general answers of the drafter the server started with.
    """
    names = sorted(set(prompts))
    tokens = sum(answer.tokens for answer in candidate)
    before = [answer.tokens for answer in candidate] if in_use is None else [answer.steps for answer in in_use]
    sums = np.zeros((2, len(names)))
    for prompt, old, answer in zip(prompts, before, candidate, strict=True):
        sums[:, names.index(prompt)] += old, answer.steps
    ratio, low, high = ratio_interval(sums)
    general, kept = tau(candidate_general), max(tau(in_use_general) if in_use_general else 1.0, first_general)
    reason = ""
    if not enough(len(names), tokens):
        reason = f"{len(names)} held-out prompts are too few"
    elif low <= 1:
        reason = "not better on held-out answers"
    elif in_use is None and tau(candidate) < FIRST_TAU:
        reason = f"tau below {FIRST_TAU}"
    elif general < GENERAL_KEPT * kept:
        reason = "worse on general answers"
    return Verdict(
        reason, len(names), tokens, tau(candidate), tau(in_use) if in_use else 1.0, ratio, low, high, general, kept
    )


def ratio_interval(sums: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """The ratio of the totals of sums [2, N], and its 95 % bootstrap interval over the N columns."""
    if not sums.shape[1]:
        return 1.0, 0.0, float("inf")
    drawn = np.random.default_rng(seed).integers(sums.shape[1], size=(RESAMPLES, sums.shape[1]))
    totals = sums[:, drawn].sum(-1)
    low, high = np.percentile(totals[0] / totals[1], [2.5, 97.5])
    first, second = sums.sum(-1)
    return float(first / second), float(low), float(high)
