"""The contract between the decode step and a planner: the step's state, the budget, and the finished step.

A decode step calls, in this order, `looks_back`, `budget`, then, if the budget drafts or looks up, `admit`, and some
time later `observe`.

Lossless rule (DSpark, section 3.2.2 and appendix A): whether x_{r,k} is admitted depends only on facts from before its
draw: c_{r,1..k}, other requests' confidences, and a budget from earlier steps. So `budget`, which also decides whether
the model and prompt lookup draft and how deep, does not see this step's draft, and `admit` must leave
min(verify_lens[r], k) unchanged if confidence[r, k:] changes. The proof is in `docs/planner.md`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .buckets import TokenBuckets
from .cost.model import StepCost


@dataclass(frozen=True, slots=True)
class StepView:
    """The state of a decode step with R requests before anything is drafted.

    rows: [R] int64, row of the engine's request pool.
    generations: [R] int64, differs when a row belongs to another request or was prefilled again.
    contexts: [R] int64, cached tokens.
    limits: [R] int64, most draft tokens the request may have; 0: speculation is off for it.
    levels: [R] float64, the request's service level in tokens per second; 0: none.
    progress: [R] float64, its tokens per second so far; inf when it has just started, or no request has a level.
    ruled: [R] bool, the request has rules (penalties, bias, grammar); its acceptance is counted apart; None: none has.
    groups: [R] int64, by LoRA adapter and rules: drafts of a group are alike; None: all are in group 0, without either.
    """

    rows: np.ndarray
    generations: np.ndarray
    contexts: np.ndarray
    limits: np.ndarray
    levels: np.ndarray
    progress: np.ndarray
    ruled: np.ndarray | None = None
    groups: np.ndarray | None = None

    @property
    def names(self) -> np.ndarray:
        """[R] int64, a number for each request that no other one has."""
        names: np.ndarray = self.rows + (self.generations << 24)
        return names


@dataclass(frozen=True, slots=True)
class Budget:
    """The decisions about a step that are made before drafting.

    draft: a drafter's model drafts in this step.
    tokens: K, most drafted tokens admitted, over all requests; None: no bound, which planners with buckets always set.
    depth: tokens that the model drafts for each, at most; None: all that it can.
    least: least corrected survival that is admitted; 0: no bound.
    first: [R] bool, requests that are served first, since they are late for their level; None: no request.
    seconds: [n+1] float64, predicted seconds of the step with 0..n drafted tokens admitted, drafting included; None
        from planners that do not know costs.
    probe: the step drafts and verifies no draft token, to see whether drafting would pay again.
    look_up: prompt lookup drafts for requests without a model's draft.
    """

    draft: bool
    tokens: int | None
    least: float = 0.0
    first: np.ndarray | None = None
    seconds: np.ndarray | None = None
    probe: bool = False
    look_up: bool = True
    depth: int | None = None

    def draft_mask(self, limits: np.ndarray) -> np.ndarray:
        """[R] bool, requests with draft limits [R] for which the model drafts."""
        drafts: np.ndarray = limits > 0 if self.draft else np.zeros(len(limits), dtype=bool)
        return drafts

    def predicted_seconds(self, admitted: int) -> float | None:
        """Expected seconds of the step with `admitted` drafted tokens; None: unknown."""
        if self.seconds is None:
            return None
        return float(self.seconds[min(admitted, len(self.seconds) - 1)])


@dataclass(slots=True, eq=False)
class FinishedStep:
    """A finished decode step of R requests. The arrays are kept: do not write to them afterwards.

    view: the object that `Planner.budget` was given.
    survival: [R, gamma] float32 of the step's confidences (`kernels.drafts.survival_of`); not read without drafts.
    verify_lens: [R], draft tokens verified. accept_lens: [R] in 1..gamma+1, tokens that came out.
    draft_mask: [R] bool, requests for which the model could draft. drafting: for how many of them it did.
    looked_up: [R] bool, drafts of prompt lookup, also of requests in `draft_mask`; None: the step did not look up.
    depth: tokens that the model drafted for each, at most; None: all that it can.
    tokens: of the forward, anchors and padding included.
    seconds: wall time of the step; None: unknown, or it had other work in it. draft_seconds: the drafts' part; None:
        unknown. host_seconds: the part of looking up, planning and admitting, if no model drafted; 0 on a GPU, which
        computes meanwhile.
    """

    view: StepView
    survival: np.ndarray
    verify_lens: np.ndarray
    accept_lens: np.ndarray
    draft_mask: np.ndarray
    drafting: int
    looked_up: np.ndarray | None = None
    depth: int | None = None
    tokens: int = 0
    seconds: float | None = None
    draft_seconds: float | None = None
    host_seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class PlannedCurve:
    """The throughput curve that a step was planned by, and the point on it that was chosen.

    tokens: [n] draft tokens verified, over all requests, in the mean. throughput: [n] tokens per second expected.
    requests: in the step. chosen: draft tokens and throughput of the plan; a plan without drafts is not on the curve.
    """

    tokens: np.ndarray
    throughput: np.ndarray
    requests: int
    chosen: tuple[float, float]


class Planner(ABC):
    """Decides each decode step: see the module's docstring for the order of calls."""

    cost: StepCost | None = None
    """Learns from the steps that are observed; None: the planner knows no costs."""
    buckets: TokenBuckets | None = None
    """Sizes of a GPU's steps: every budget then has a bound, which fills a bucket. None: any size."""
    draft_sizes: Sequence[int] = ()
    """Numbers of requests for which a GPU has graphs of drafts, ascending: drafting for any of R requests takes the
    time of the smallest size of at least R. Empty: the time of as many drafts as are made."""
    block: int | None = None
    """Tokens of a model's whole draft, if the budget may choose fewer. None: it may not."""

    def looks_back(self, step: StepView) -> bool:
        """True if `budget` will use the outcomes of earlier steps, so that they should be observed by then."""
        return True

    def budget(self, step: StepView) -> Budget:
        """Decide from the past whether to draft and how much to verify. By default: draft, and verify without bound."""
        return Budget(draft=bool(step.limits.any()), tokens=None)

    def curve(self) -> PlannedCurve | None:
        """The curve of the last planned step; None from planners without a curve, and before the first step."""
        return None

    @abstractmethod
    def admit(self, confidence: torch.Tensor, draft_lens: torch.Tensor, budget: Budget) -> torch.Tensor:
        """verify_lens [R] int64 in 0..draft_lens, on the confidence's device.

        confidence: [R, gamma] float32, calibrated, c_k = P(x_k is accepted | x_1 ... x_{k-1} are); NaN counts as 0.
        draft_lens: [R] int64 in 0..limits, how many tokens were drafted.
        """

    def observe(self, step: FinishedStep) -> None:
        """Take in a finished step; steps come in order, perhaps several before a `budget` that looks back."""
        if self.cost is None:
            return
        requests = len(step.view.rows)
        if step.looked_up is not None and not step.drafting and step.host_seconds:
            self.cost.observe_deciding(requests, step.host_seconds)
        if step.seconds is None:
            return
        decided = step.drafting or step.looked_up is not None
        seconds = step.seconds - self.cost.deciding(requests) if decided else step.seconds
        drafts = self.charged_drafts(float(step.drafting), requests, step.depth)
        context = float(np.add.reduce(step.view.contexts))
        draft_seconds = step.draft_seconds if step.drafting else 0.0
        self.cost.observe(requests, step.tokens, context, drafts, seconds, draft_seconds)

    def verifying(self, cost: StepCost, step: StepView, room: int) -> np.ndarray:
        """[room+1] seconds of a step with 0..room admitted tokens, without drafting and the host's time."""
        tokens = np.arange(len(step.rows), len(step.rows) + room + 1)
        if self.buckets is not None:
            tokens = self.buckets.round_up_each(tokens)
        return cost.seconds(len(step.rows), tokens, float(np.add.reduce(step.contexts)))

    def charged_drafts(self, drafts: float, requests: int, depth: Any) -> Any:
        """Whole drafts that a step of `requests` pays for if the model drafts `depth` tokens for `drafts` of them."""
        if self.draft_sizes and drafts:
            return float(next((size for size in self.draft_sizes if size >= requests), requests))
        return drafts if depth is None or self.block is None else drafts * depth / self.block
