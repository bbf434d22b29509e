"""The gate: a candidate passes only if it drafts better than the drafter in use on answers new to both.

Both follow the same answers as a server would, greedily and teacher-forced (`training/validate.py`), with prompt lookup
before the drafter (`lookups.py`). The candidate's saved steps are summed by prompt, so that a frequent prompt is one
observation. If the two drafters are equally good, each sum is as likely to have the other sign. That gives the exact
chance of such a total, however few prompts there are (Fisher, The Design of Experiments, 1935, section 21). Candidates
are compared repeatedly on the same answers, so each attempt gets a part of the allowed chance.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np
import torch

from ..training.batches import BatchMaker, TrainingStep
from ..training.store import Sequence
from ..training.validate import Drafts, runs_along, steps_along
from .lookups import Lookups

FIRST_GATE, GATE_EVERY = 60, 150
"""Steps of a run before its first gate, and the fewest between gates: later ones come after half as many steps more."""
CHANCE = 0.025
"""Largest chance that any attempt passes if no candidate is better than the drafter in use."""
GENERAL_KEPT = 0.9
"""Smallest tau on general answers, relative to the drafter in use and to the one the server started with."""
FIRST_GAIN = 1.3
"""Smallest tau of a first drafter, relative to none."""


@dataclass(frozen=True, slots=True)
class Followed:
    """Decoding along one answer of `tokens` tokens, teacher-forced, in `steps` steps, N of them with a model's drafts.

    confidence: [N, gamma] float32, raw; reach: [N] int64, draft tokens that the answer verifies; accepted: [N] int64.
    """

    tokens: int
    steps: int
    confidence: np.ndarray
    accepted: np.ndarray
    reach: np.ndarray


def tau(answers: Iterable[Followed]) -> float:
    """Return the tokens a step over several answers; 1 without answers."""
    answers = list(answers)
    return sum(a.tokens for a in answers) / sum(a.steps for a in answers) if answers else 1.0


@torch.inference_mode()
def follow(drafts: Drafts, maker: BatchMaker, sequences: Iterable[Sequence], lookups: Lookups) -> list[Followed]:
    """Follow each answer with prompt lookup and a drafter. maker: cuts the drafter's steps."""
    followed, gamma = [], maker.config.gamma
    for s in sequences:
        sure: list[torch.Tensor] = []

        def hits(step: TrainingStep, sure: list[torch.Tensor] = sure) -> torch.Tensor:
            tokens, confidence = drafts(step)
            sure.append(confidence.float().cpu())
            return tokens == step.tokens[:, 1:]

        expected, looked_up = lookups.along(s, gamma)
        runs = torch.tensor(runs_along(maker, s, hits))
        confidence = torch.cat(sure)
        taken = lookups.taken(expected, confidence)
        runs = torch.where(taken, looked_up, runs)
        steps = torch.tensor(steps_along(runs.tolist(), len(runs), max(gamma, lookups.gamma)))
        places, reach, accepted = steps[:, ~taken[steps[0]]]
        arrays = confidence[places].numpy(), accepted.numpy(), reach.clamp(max=gamma).numpy()
        followed.append(Followed(len(runs), steps.shape[1], *arrays))
    return followed


def follow_alone(lookups: Lookups, gamma: int, sequences: Iterable[Sequence]) -> list[Followed]:
    """Follow each answer without a drafter: with prompt lookup, or one token a step."""
    followed, none = [], np.zeros(0, np.int64)
    for s in sequences:
        runs = lookups.along(s, gamma)[1].tolist()
        steps = len(steps_along(runs, len(runs), lookups.gamma)[0])
        followed.append(Followed(len(runs), steps, np.zeros((0, gamma), np.float32), none, none))
    return followed


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """A comparison of a candidate with the drafter in use.

    ratio: tau of the candidate over tau of the drafter in use, on held-out answers.
    chance: that an equally good candidate saves as many steps; level: the largest that passes at this attempt.
    reason: of the refusal; "" if the candidate passed.
    """

    reason: str
    prompts: int
    tokens: int
    candidate_tau: float
    in_use_tau: float
    ratio: float
    attempt: int
    chance: float
    level: float
    candidate_general: float
    in_use_general: float

    @property
    def passed(self) -> bool:
        return not self.reason

    def numbers(self) -> dict[str, object]:
        """Return the fields with four significant digits, for logs and files."""
        return {name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in asdict(self).items()}


@dataclass
class Patience:
    """Gates in a row without progress, the best tau of the run, and answers to wait for; 0: none."""

    fruitless: int = 0
    best_tau: float = 0.0
    wait_for: int = 0


def gate_after(step: int) -> bool:
    """Return True if a gate follows this step of a run."""
    gate = FIRST_GATE
    while gate < step:
        gate += max(GATE_EVERY, gate // 2)
    return gate == step


def level(attempt: int) -> float:
    """Return the chance allotted to an attempt, counted from 1; all attempts together have `CHANCE`."""
    return CHANCE / (attempt * (attempt + 1))


def enough(prompts: int, attempt: int) -> bool:
    """Return True if a candidate that is better for every one of `prompts` held-out prompts passes at this attempt."""
    return 0.5**prompts <= level(attempt)


def chance_of(saved: np.ndarray) -> float:
    """Return the chance that `saved` [N] int64 sums to as much or more if either sign of each number is as likely."""
    lost = int(-saved[saved < 0].sum())
    sums = np.eye(1, lost + 1)[0]  # chance of each sum of the negative numbers, up to `lost`
    for size in np.abs(saved):
        sums = (sums + np.concatenate([np.zeros(size), sums])[: lost + 1]) / 2
    return float(sums.sum())


def compare(
    candidate: list[Followed], in_use: list[Followed], prompts: list[str], candidate_general: list[Followed],
    in_use_general: list[Followed], first_general: float = 0.0, *, attempt: int = 1, least: float = 1.0,
) -> GateVerdict:  # fmt: skip
    """Judge a candidate on the answers that both followed, in the same order; prompts: each answer's.

    least: smallest ratio with which it passes. first_general: tau of the server's first drafter on general answers.
    attempt: number of this comparison since the last candidate, from 1.
    """
    saved: dict[str, int] = dict.fromkeys(prompts, 0)
    for prompt, old, new in zip(prompts, in_use, candidate, strict=True):
        saved[prompt] += old.steps - new.steps
    chance, allowed = chance_of(np.array(list(saved.values()), np.int64)), level(attempt)
    ratio = tau(candidate) / tau(in_use)
    general, kept = tau(candidate_general), max(tau(in_use_general), first_general)
    reason = ""
    if not enough(len(saved), attempt):
        reason = f"{len(saved)} held-out prompts are too few"
    elif chance > allowed:
        reason = "not better on held-out answers"
    elif ratio < least:
        reason = f"less than {least} times as good"
    elif general < GENERAL_KEPT * kept:
        reason = "worse on general answers"
    return GateVerdict(
        reason, len(saved), sum(answer.tokens for answer in candidate), tau(candidate), tau(in_use), ratio, attempt,
        chance, allowed, general, kept,
    )  # fmt: skip
