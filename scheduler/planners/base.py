"""The planner interface: who drafts how much, and each request's verification length from the confidences.

Lossless rule (DSpark, section 3.2.2 and appendix A): whether x_{r,k} is admitted may depend only on what was known
before it was drawn: c_{r,1..k}, other requests, and a budget from two or more steps ago. `Planner.budget` therefore
sees nothing of the current draft, and `Planner.admit` must leave min(verify_lens[r], k) unchanged whatever
confidence[r, k:] turns out to be.

Who drafts is also decided from the past. Let F be all that is known when `budget` is called: the texts so far, those of
other requests that lookups read, and the confidences of earlier steps. The requests that draft, the source of each
draft (the model or prompt lookup) and the least survival that is admitted are functions of F. The random numbers of a
step are new, so given F every x_{r,k} is still drawn from its q_{r,k}, and its admission depends on F, c_{r,1..k} and
other requests' draws, which given F are independent of it. Rejection sampling gives the target's distribution whether r
has no draft, a lookup (q is a point mass, a function of these texts) or a model's draft, so choosing between them by F
is choosing between exact procedures. A choice that looked at this step's draws would not be exact: drafting again,
preferring the source that is confident of what it drew, or leaving out a request for what another drew with the same
random numbers.

The depth is such a choice too. A shorter block may have another q at each position, but its tokens are drawn from that
q and tested by it. Given F, which fixes the depth d, x_{r,1..d} are drafts like any others. Drawing both blocks and
taking one for what was drawn would not be exact.

A rest is such a choice too: whether a step looks up or plans anything, and when a probe ends the rest. It is a function
of F as long as it counts steps, adds the times of finished steps and reads survivals of earlier steps. A rest that
ended because of what this step's lookup or draft found would not be; in a rest nothing is searched. A correction of
survivals by earlier outcomes is known before as well, and its bounds are compared with c_{r,1..k} alone.

The admission of x_{r,k} may depend on other requests, because their draws are independent of it: a request without a
seed shares its random numbers with nobody. Requests with equal seeds share theirs, so r's admission may depend on what
equals its own draw, or a later one. That does no harm: a seeded request says y at a position, a function of its seed,
the position and the text before it (`kernels/noise.py`). A draft is kept if it equals y; if not, or if it was not
admitted, y comes out. Admission decides how many of these y a step finds, and changes none of them. Nor do they say
anything of a request without a seed, whose numbers are independent of every seed's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..cost.model import StepCost
from .admission import Admit
from .token_buckets import TokenBuckets


@dataclass(frozen=True, slots=True)
class StepView:
    """The state of a decode step with R requests before anything is drafted.

    rows: [R] int64, row of the engine's request pool.
    generations: [R] int64, differs when a row belongs to another request or was prefilled again.
    contexts: [R] int64, cached tokens.
    limits: [R] int64, most draft tokens the request may have; 0: speculation is off for it.
    levels: [R] float64, tokens per second that the request asked for; 0: none.
    progress: [R] float64, tokens per second that it has had so far; inf when it has just started, or nobody asked.
    ruled: [R] bool, its drafts are accepted by rules of its own (penalties, bias, grammar), so they tell nothing of
        others' drafts; None: nobody's are.
    groups: [R] int64, requests whose drafts tell of each other's: those of one LoRA adapter, 0 without one; None: all.
    """

    rows: np.ndarray
    generations: np.ndarray
    contexts: np.ndarray
    limits: np.ndarray
    levels: np.ndarray
    progress: np.ndarray
    ruled: np.ndarray | None = None
    groups: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """The decisions about a step that are made before drafting.

    draft: False: no drafter's model drafts in this step.
    tokens: K, most drafted tokens admitted, over all requests; None: no bound, which planners with buckets always set.
    selected: [R] bool, requests for which a drafter's model drafts, where `draft`; None: all.
    depth: tokens that it drafts for each, at most; None: all that it can.
    threshold: least corrected survival that is admitted; 0: no bound.
    thresholds: [gamma] the same by position, in its place; None: as `threshold`.
    first: [R] bool, requests served before all others (behind their level); None: nobody.
    seconds: [n+1] float64, predicted seconds of the step with 0..n drafted tokens admitted, drafting included; None
        from planners that do not know costs.
    probe: only to see whether it would pay again: the model drafts and nothing is verified, so what it costs is known,
        or something is looked up.
    look_up: prompt lookup drafts for requests for which no model does; where neither it nor the model may
        draft, the step does nothing for speculation.
    """

    draft: bool
    tokens: int | None
    selected: np.ndarray | None = None
    threshold: float = 0.0
    first: np.ndarray | None = None
    seconds: np.ndarray | None = None
    probe: bool = False
    look_up: bool = True
    depth: int | None = None
    thresholds: np.ndarray | None = None

    def draft_mask(self, limits: np.ndarray) -> np.ndarray:
        """[R] bool, requests with draft limits [R] for which the model drafts."""
        if not self.draft:
            return np.zeros(len(limits), dtype=bool)
        able: np.ndarray = limits > 0
        return able if self.selected is None else able & self.selected

    def predicted_seconds(self, admitted: int) -> float | None:
        """Seconds that the step was expected to take with `admitted` drafted tokens; None when not known."""
        if self.seconds is None:
            return None
        return float(self.seconds[min(admitted, len(self.seconds) - 1)])


@dataclass(slots=True, eq=False)
class FinishedStep:
    """A decode step of R requests that is over. The arrays are kept: do not write to them afterwards.

    view: the very object that `Planner.budget` was given.
    survival: [R, gamma] float32 of the step's confidences (`admission.survival_of`); not read where nothing was
        drafted.
    verify_lens: [R], draft tokens verified. accept_lens: [R] in 1..gamma+1, tokens that came out.
    draft_mask: [R] bool, requests for which the model could draft. drafting: for how many of them it did.
    looked_up: [R] bool, drafts of prompt lookup, also of requests in `draft_mask`; None: nothing was looked up.
    depth: tokens that the model drafted for each, at most; None: all that it can.
    tokens: of the forward, anchors and padding included.
    seconds: wall time of the step; None when it is not known or had other work in it. draft_seconds: of it for drafts;
        None when it is not known. host_seconds: of it for looking up, planning and admitting, where no model drafted; 0
        on a GPU, whose host does so meanwhile.
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
    requests: in the step. chosen: draft tokens and throughput of the plan; it may be beside the curve where nobody was
        to draft.
    """

    tokens: np.ndarray
    throughput: np.ndarray
    requests: int
    chosen: tuple[float, float]


class Planner(ABC):
    """Called once per decode step, in this order: `looks_back`, `budget`, then, where it says so, draft and `admit`,
    and at some time later `observe`."""

    cost: StepCost | None = None
    """Learns from the steps that are observed; None: the planner knows no costs."""
    buckets: TokenBuckets | None = None
    """Sizes of which a step has one, on a GPU: every budget then has a bound, which fills a bucket. None: any size."""
    admit_by: Admit | None = None
    """Compiled admission in one call. None: torch or numpy admit."""
    draft_sizes: Sequence[int] = ()
    """Numbers of requests, ascending, for which a GPU has graphs of drafts: a draft for any of R requests takes the
    time of the smallest that holds all R. Empty: that of as many as it is for."""
    block: int | None = None
    """Tokens of a whole draft of the model's, where it may be asked for fewer. None: it always drafts as many."""

    def looks_back(self, step: StepView) -> bool:
        """True if `budget` will use the outcomes of earlier steps, so that they should be observed by then."""
        return True

    def budget(self, step: StepView) -> Budget:
        """Decide from the past whether to draft and how much to verify. By default: draft for whom it is on."""
        return Budget(draft=bool(step.limits.any()), tokens=None)

    def curve(self) -> PlannedCurve | None:
        """The curve of the last planned step; None from planners without a curve, and before the first step."""
        return None

    @abstractmethod
    def admit(self, confidence: torch.Tensor, draft_lens: torch.Tensor, budget: Budget) -> torch.Tensor:
        """verify_lens [R] int64 in 0..draft_lens, on the confidence's device.

        confidence: [R, gamma] float32, calibrated, c_k = P(x_k is accepted | those before it were); NaN counts as 0.
        draft_lens: [R] int64 in 0..limits, how many tokens were drafted.
        """

    def observe(self, step: FinishedStep) -> None:
        """Take in a finished step; steps come in order, perhaps several before a `budget` that looks back."""
        if self.cost is None:
            return
        if step.looked_up is not None and not step.drafting and step.host_seconds:
            self.cost.observe_deciding(step.host_seconds)
        if step.seconds is None:
            return
        decided = step.drafting or step.looked_up is not None
        seconds = step.seconds - self.cost.deciding if decided else step.seconds
        drafts = float(step.drafting)
        if step.depth is not None and self.block is not None:
            drafts *= step.depth / self.block
        context = float(np.add.reduce(step.view.contexts))
        draft_seconds = step.draft_seconds if step.drafting else 0.0
        self.cost.observe(len(step.view.rows), step.tokens, context, drafts, seconds, draft_seconds)
