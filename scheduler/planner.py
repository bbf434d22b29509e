"""The planner: before each decode step it decides whether to draft, how deep, and how many tokens to verify.

It is DSpark's asynchronous planner (section 5.2). It plans by steps that are at least two old, never by this step's
drafts; so it may search the whole of a jagged throughput curve and stay lossless (appendix A, `docs/planner.md`).

A step, from top to bottom:

1. `budget` keeps the last plan for a few steps of the same requests. Otherwise it learns from finished steps
   (`_absorb`) and makes a new plan (`_decide`).
2. `_decide` compares three plans: rest (no drafts at all), prompt lookups alone, and the model's drafts at their best
   depth. Each has a curve (`curve.py`) of expected tokens per second by K, the draft tokens that are verified:

       Theta(K) = (R + sum of the K largest survivals) / (T(R, R + K, context) + T_host + T_draft(R, depth))

   The plan that keeps most service levels wins, then the one with the highest point. If no draft pays, a probe drafts
   now and then to notice a change (`probing.py`).
3. After drafting, `admit` takes the tokens of largest survival within the budget (`admission.py`).
4. `observe` takes in the finished step: times teach `cost/`, survivals and outcomes `history.py`.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .admission import largest
from .contract import Budget, FinishedStep, PlannedCurve, Planner, StepView
from .cost.model import StepCost
from .curve import Curve, curve_by_survival, curve_by_tokens
from .history import SAMPLES, Correction, SurvivalHistory
from .probing import Probing, mostly_the_same
from .service_levels import levels_kept

LAG = 2
"""A budget uses steps that are at least this many before it; a GPU still runs the last one."""


@dataclass(slots=True, eq=False)
class PlannedStep:
    """A step and its budget."""

    number: int
    view: StepView
    budget: Budget


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One way to run a step.

    curve, point: its throughput curve and the best point of it. kept: service levels kept at that point.
    drafts: the model drafts. depth: tokens of each of its drafts; None: whole ones. drafting: their expected seconds.
    """

    curve: Curve
    point: int
    kept: int
    drafts: bool = False
    depth: int | None = None
    drafting: float = 0.0

    @property
    def throughput(self) -> float:
        return float(self.curve.throughput[self.point])

    @property
    def verified(self) -> float:
        """Mean draft tokens."""
        return self.point / self.curve.count

    def value(self, required_return: float = 1.0) -> tuple[int, float]:
        """Key by which plans are compared: levels kept, then throughput with only this share of the drafts' seconds."""
        seconds = float(self.curve.seconds[self.point])
        return self.kept, self.throughput * seconds / (seconds - (1 - required_return) * self.drafting)


class Asynchronous(Planner):
    """The planner described above.

    gamma: width of the confidences. smoothing: with fewer requests than this, several past drafts of each are used, so
    that one unlucky draft does not decide; 1: only the last draft of each. held: most steps for which a plan holds;
    making one costs as much as verifying two tokens of a small model. required_return: share of its own cost that a
    draft must be expected to bring; below 1, since a request that does not draft gives no news, and its past says
    little about its next passage.
    """

    cost: StepCost

    def __init__(
        self, cost: StepCost, gamma: int, *, smoothing: int = SAMPLES, held: int = 4, required_return: float = 0.7,
    ):  # fmt: skip
        if min(gamma, smoothing, held) < 1:
            raise ValueError(f"gamma, smoothing and held are at least 1, not {gamma}, {smoothing} and {held}")
        self.cost, self.gamma = cost, gamma
        self.smoothing, self.held, self.required_return = smoothing, held, required_return
        self.history = SurvivalHistory(gamma)  # of requests for which the model could draft
        self.lookups: SurvivalHistory | None = None  # of prompt lookups alone; None before the first
        self.correction, self.ruled_correction = Correction(), Correction()  # of requests without and with rules
        self.probing = Probing()
        self._number, self._last_probe, self._has_rested = 0, -LAG, False
        self._last: PlannedStep | None = None  # the last step for which a plan was made
        self.considered: tuple[list[Plan], Plan] | None = None  # the last plans, and the best of them
        self._open: deque[PlannedStep] = deque()  # not observed yet
        self._finished: list[tuple[PlannedStep, FinishedStep]] = []  # not learned from yet

    # -- before drafting ------------------------------------------------------------------------------------------

    def looks_back(self, step: StepView) -> bool:
        """False while the last plan holds. Limits may fall meanwhile: they also bound each draft directly."""
        last = self._last
        if last is None or self._number <= self._last_probe + LAG or np.count_nonzero(step.levels):
            return True
        if last.budget.draft or last.budget.look_up:
            if self._number - last.number >= self.held or len(step.rows) != len(last.view.rows):
                return True
        elif self.probing.ready:
            return True
        return not mostly_the_same(step.names, last.view.names)

    def budget(self, step: StepView) -> Budget:
        room = int(np.add.reduce(step.limits))
        if self._last is None or self.looks_back(step):
            self._absorb()
            budget = self._decide(step, room)
            self._last = PlannedStep(self._number, step, budget)
        else:
            budget = self._last.budget
            if not budget.draft and budget.seconds is not None:
                self.probing.save(float(budget.seconds[0]))
        self._open.append(PlannedStep(self._number, step, budget))
        if budget.probe:
            self._last_probe = self._number
        self._number += 1
        return budget

    def _decide(self, step: StepView, room: int) -> Budget:
        """The budget of the best plan, or a probe."""
        seconds = self.verifying(self.cost, step, room)
        if not room:
            return Budget(draft=False, tokens=0, seconds=seconds)
        host = self.cost.deciding(len(step.rows))
        plans = self._plans(step, seconds, host)
        best = max(plans, key=lambda plan: plan.value(self.required_return))  # of equal ones the first: drafts least
        self.considered = plans, best
        if not best.drafts:
            probe = seconds + (host + plans[-1].drafting)
            loss = float(probe[0]) - len(step.rows) / best.throughput  # the best plan takes less for as many tokens
            if self.probing.due(loss, float(seconds[0])):
                return Budget(draft=True, tokens=0, seconds=probe, probe=True, depth=plans[-1].depth)
            if best is plans[0]:  # the first rest looks up, to see whether the drafter has lookups
                look_up, self._has_rested = self.lookups is None and not self._has_rested, True
                return Budget(draft=False, tokens=0, seconds=seconds[:1], probe=look_up, look_up=look_up)
        tokens = best.curve.most(best.point)
        if self.buckets is not None:
            tokens = self.buckets.fill_bucket(len(step.rows), tokens, room)
        late, expected = step.progress < step.levels, seconds + (host + best.drafting)
        first = late if late.any() else None
        return Budget(best.drafts, tokens, best.curve.least(best.point), first, expected, depth=best.depth)

    # -- plans ----------------------------------------------------------------------------------------------------

    def _plans(self, step: StepView, seconds: np.ndarray, host: float) -> list[Plan]:
        """All plans, a rest first and the model's drafts last.

        seconds: [room+1] of a step with 0..room admitted tokens, without the host's time and drafting.
        """
        survival, drafted = self._read(self.history, step)
        plans, free = [self._plan(step, None, seconds[:1])], None
        if self.lookups is not None:
            free, _ = self._read(self.lookups, step)
            plans.append(self._plan(step, free, seconds + host))
        drafted *= step.limits > 0
        depth = self._depth(survival, drafted, seconds, plans[-1].throughput)
        drafting = self._drafting(drafted, depth)
        if depth is not None:  # no depth cuts lookups
            beyond = survival[:, :, depth : self.block]
            np.minimum(beyond, 0.0 if free is None else free[:, :, depth : self.block], out=beyond)
        plans.append(self._plan(step, survival, seconds + (host + drafting), True, depth, drafting))
        return plans

    def _depth(self, survival: np.ndarray, drafted: np.ndarray, seconds: np.ndarray, least: float) -> int | None:
        """Tokens that the model drafts for each request: the number that brings most, less its cost. None: no choice.

        A second costs the tokens that it would bring otherwise: at the last plan's throughput, at least at `least`.
        """
        if self.block is None:
            return None
        price = self.required_return * max(0.0 if self.considered is None else self.considered[1].throughput, least)
        gain = np.maximum(survival[:, :, : self.block] - np.float32(price * self._per_token(seconds)), 0.0)
        brought = np.einsum("srk,sr->k", gain, drafted).cumsum() / len(gain)
        return int((brought - price * self._drafting(drafted, np.arange(1, self.block + 1))).argmax()) + 1

    def _plan(
        self, step: StepView, survival: np.ndarray | None, seconds: np.ndarray, drafts: bool = False,
        depth: int | None = None, drafting: float = 0.0,
    ) -> Plan:  # fmt: skip
        """The plan with the best point of its curve. survival: [samples, R, gamma]; None: without drafts."""
        requests = len(step.rows)
        if survival is None:
            curve = Curve(requests / seconds, seconds)
        elif self.buckets is not None or len(survival) == 1:
            curve = curve_by_tokens(requests, survival, seconds, padded=self.buckets is not None)
        else:
            curve = curve_by_survival(requests, survival, seconds)
        point, most = int(curve.throughput.argmax()), 0
        if np.count_nonzero(leveled := step.levels > 0):
            levels = step.levels[leveled]
            kept = levels_kept(levels, np.ones(len(levels)), curve.seconds)
            if survival is not None:  # but point 0, which admits no drafts
                kept[1:] = levels_kept(levels, 1.0 + survival.sum(2).mean(0)[leveled], curve.seconds[1:])
            most = int(kept.max())
            point = int(np.where(kept == most, curve.throughput, 0.0).argmax())
        return Plan(curve, point, most, drafts, depth, drafting)

    def _read(self, history: SurvivalHistory, step: StepView) -> tuple[np.ndarray, np.ndarray]:
        """`SurvivalHistory.read`, corrected and cut to the limits."""
        survival, drafted = history.read(step.rows, step.generations, -(-self.smoothing // len(step.rows)), step.groups)
        survival *= self._factor(step)
        if step.limits.min() < self.gamma:
            survival *= np.arange(self.gamma) < step.limits[:, None]
        return survival, drafted

    def _factor(self, step: StepView) -> Any:
        """Correction of survivals, float32: one number, or [R, 1] if any request has rules."""
        if step.ruled is None:
            return np.float32(self.correction.factor)
        factors = np.where(step.ruled, self.ruled_correction.factor, self.correction.factor)
        return factors.astype(np.float32)[:, None]

    def _drafting(self, drafted: np.ndarray, depth: Any) -> Any:
        """Mean seconds of the model's drafts of `depth` tokens. drafted: [samples, R] chances that it has to draft."""
        drafts, requests = float(drafted.sum()) / len(drafted), drafted.shape[1]
        return min(drafts, 1.0) * self.cost.draft_seconds(self.charged_drafts(max(drafts, 1.0), requests, depth))

    def _per_token(self, seconds: np.ndarray) -> float:
        """Mean seconds that a verified token adds, over as many tokens as the last plan verified, at least gamma."""
        verified = 0 if self.considered is None else int(self.considered[1].verified)
        reach = min(max(verified, self.gamma), len(seconds) - 1)
        return max(float(seconds[reach] - seconds[0]) / reach, 0.0)

    # -- after drafting -------------------------------------------------------------------------------------------

    def admit(self, confidence: torch.Tensor, draft_lens: torch.Tensor, budget: Budget) -> torch.Tensor:
        bounds = None
        if budget.least:  # a corrected survival; `largest` compares survivals as drafted
            bounds = budget.least / np.maximum(self._factor(self._open[-1].view), 1e-9)
            bounds = bounds if bounds.ndim else np.full(confidence.shape[1], bounds)
        return largest(confidence, draft_lens, budget.tokens, bounds=bounds, first=budget.first)

    def observe(self, step: FinishedStep) -> None:
        super().observe(step)
        while self._open:  # steps that were never observed are dropped
            planned = self._open.popleft()
            if planned.view is step.view:
                if step.drafting or step.looked_up is not None:
                    self._finished.append((planned, step))
                return
        raise ValueError("observe() wants a step whose view budget() was given, each once and in step order")

    def _absorb(self) -> None:
        """Learn from finished steps that are at least LAG old; from large ones only if they are the last."""
        old = [(planned, step) for planned, step in self._finished if planned.number <= self._number - LAG]
        del self._finished[: len(old)]
        for planned, step in old:
            if step is old[-1][1] or len(step.view.rows) < self.smoothing:
                self._learn(planned, step)

    def _learn(self, planned: PlannedStep, step: FinishedStep) -> None:
        """Learn the survivals of drafts, and how many of their tokens were accepted."""
        view, survival = step.view, step.survival
        if planned.budget.probe and step.seconds is not None and planned.budget.seconds is not None:
            self.probing.give_back(float(planned.budget.seconds[0]) - step.seconds)
        if np.count_nonzero(step.verify_lens):
            taught = step.verify_lens if view.ruled is None else np.where(view.ruled, 0, step.verify_lens)
            self.correction.observe(survival, taught, step.accept_lens)
            if view.ruled is not None:
                self.ruled_correction.observe(survival, step.verify_lens - taught, step.accept_lens)
        elif planned.budget.probe:
            self.correction.fade()
            self.ruled_correction.fade()
        if step.looked_up is not None:
            self.lookups = self.lookups or SurvivalHistory(self.gamma, prior=0.0)
            self.lookups.write(view.rows, view.generations, survival * step.looked_up[:, None], 0.0, view.groups)
        who = np.flatnonzero(step.draft_mask)
        if not len(who):
            return
        survival, groups = survival[who], None if view.groups is None else view.groups[who]
        looked_up = np.zeros(len(who), dtype=bool) if step.looked_up is None else step.looked_up[who]
        lookups = int(np.count_nonzero(looked_up))
        in_vain = step.drafting - (len(who) - lookups)  # drafts of the model that gave way to lookups, of any of these
        drafted = np.where(looked_up, max(in_vain, 0) / max(lookups, 1), 1.0)
        if (depth := planned.budget.depth) is not None and self.block is not None and depth < self.block:
            whole = self.history.extrapolated(survival, depth, self.block)
            survival = np.where(looked_up[:, None], survival, whole)
        self.history.write(view.rows[who], view.generations[who], survival, drafted, groups)

    def curve(self) -> PlannedCurve | None:
        if self.considered is None or self._last is None:
            return None
        plans, best = self.considered
        # A rest is a single point: the longest curve is shown, which tells how drafting would do.
        shown = best if len(best.curve.throughput) > 1 else max(plans, key=lambda plan: len(plan.curve.throughput))
        requests = len(self._last.view.rows)
        return PlannedCurve(shown.curve.tokens, shown.curve.throughput, requests, (best.verified, best.throughput))
