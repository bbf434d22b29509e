"""The asynchronous planner (DSpark, section 5.2), with a choice of who drafts, and service levels.

Candidates are compared by the best point of their throughput curve. With the survivals of two steps ago, sorted, it is

    Theta(K) = (R + sum of the K largest survivals) / (T(R, R + K, context) + T_draft(requests that draft) + T_decide).

Candidates: the model drafts for nobody, for some requests or for all (`draft_selection.py`), or the step rests
(`resting.py`). In a rest nothing is looked up, planned or admitted, which saves T_decide, the host's time. Requests for
which the model does not draft have the drafts of prompt lookup. On a CPU the model drafts only where lookup is unsure,
so T_draft is that of the mean number of drafts.

With few requests (R < `smoothing`) several past steps of each are used. A fixed number of tokens would ignore how good
the present draft is, so the budget is then a least survival, K is what reaches it, and Theta is a ratio of means over
the samples. With buckets (a GPU) a step's size is decided before its drafts are there: points are then numbers of
tokens, each takes the time of its bucket, and the best is raised to what its bucket holds.

Curves jump, so the whole curve is searched. That is lossless because it never reads the current step (appendix A). It
does not read the step before either, which on a GPU is still running. The proof is in `docs/planner.md`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from ..cost.model import StepCost
from ..service_levels import behind, levels_kept
from .admission import largest
from .base import Budget, FinishedStep, PlannedCurve, Planner, StepView
from .curve import Curve, convex, mean_curve, pooled_curve, single_curve
from .draft_selection import FEW, DraftSelection, cost_of, worth_drafting
from .past import Issued, Past
from .probing import LOOK_SHARE, Probing
from .resting import Resting, same_requests
from .sorting import RESOLUTION
from .survival_history import SurvivalHistory

LAG = 2
"""A budget sees steps that are at least this many before it."""
HELD = 4
"""Most steps for which a plan holds while the requests stay the same. Making one costs as much as verifying two tokens
of a small model."""
REFRESH = 8
"""Steps for which predicted times are cached while the number of requests stays: context and drift move slowly."""
LATE = 64
"""Steps that may be unobserved at a time."""
REQUIRED_RETURN = 0.7
"""Share of its own cost that a draft must be expected to bring. Below 1: a request without drafts shows nothing, and
what was seen of a text says little about what comes next."""
STALE = 32
"""Steps after which the model drafts again for a request that was left out while others drafted."""


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """One way to draft, and its value.

    selection: who drafts; None: nobody. best: the best point of `curve`. kept: service levels kept there.
    uncounted: seconds left out when candidates are compared, see `REQUIRED_RETURN`.
    """

    selection: DraftSelection | None
    curve: Curve
    best: int
    kept: int
    uncounted: float

    @property
    def worth(self) -> tuple[int, float]:
        throughput, seconds = float(self.curve.throughput[self.best]), float(self.curve.seconds[self.best])
        return self.kept, throughput * seconds / (seconds - self.uncounted)


class Asynchronous(Planner):
    """Decides from past steps who drafts and the budget, and admits by the present confidences.

    gamma: width of the confidences.
    smoothing: with fewer requests than this, several past steps of each are looked at, so that one unlucky draft of a
        lone request does not decide; 1: the step of two ago alone.
    held: steps for which a plan holds at most; 1: every step is planned anew.
    required_return: drafts are made that bring this share of what they cost, or more.
    """

    cost: StepCost

    def __init__(
        self,
        cost: StepCost,
        gamma: int,
        *,
        smoothing: int = 64,
        held: int = HELD,
        required_return: float = REQUIRED_RETURN,
    ):
        if min(gamma, smoothing, held) < 1:
            raise ValueError(f"gamma, smoothing and held are at least 1, not {gamma}, {smoothing} and {held}")
        self.cost = cost
        self.gamma = gamma
        self.smoothing = smoothing
        self.held = held
        self.required_return = required_return
        self.past = Past(gamma)
        self._probing = Probing()  # whether the model should draft
        self._looking = Probing(LOOK_SHARE)  # whether something should be looked up
        self._cannot_look_up = False
        self._resting = Resting()
        self._number = 0
        self._last_probe = -LAG
        self._plan: tuple[Budget, Issued] | None = None  # the last that was made, and for which step
        self._considered: tuple[int, list[_Candidate], _Candidate] | None = None  # requests, candidates, the best
        self._price = 0.0  # tokens per second of the last plan
        self._verified = 1.0  # draft tokens that it meant to verify
        self._issued: deque[Issued] = deque(maxlen=LATE)
        self._finished: deque[tuple[Issued, FinishedStep]] = deque()
        self._positions = np.arange(gamma)
        self._curve = np.zeros(1)  # seconds by admitted tokens, without drafting
        self._draft_curves = np.zeros((1, 1))  # seconds by depth and by requests that draft; both for:
        self._curve_requests, self._curve_step = 0, 0

    def looks_back(self, step: StepView) -> bool:
        """False while the last plan holds. Limits may fall meanwhile; they bound drafts by themselves."""
        if self._plan is None:
            return True
        if self._resting.on:
            return self._probing.ready or self._looking.ready or not self._resting.holds(step)
        budget, made = self._plan
        if self._number - made.number >= self.held or budget.probe or not budget.look_up:
            return True
        return bool(np.count_nonzero(step.levels)) or not same_requests(step, made.view)

    def budget(self, step: StepView) -> Budget:
        issued = Issued(self._number, step, int(np.add.reduce(step.limits)))
        self._issued.append(issued)
        if self._plan is not None and not self.looks_back(step):
            budget, made = self._plan
            if not budget.draft and budget.seconds is not None and made.room:
                self._probing.save(float(budget.seconds[0]))
                if self._resting.on:
                    self._looking.save(float(budget.seconds[0]))
                    self._resting.extend(step)
        else:
            self._absorb()
            self._resting.end()
            budget = self._decide(issued)
            self._plan = budget, issued
        issued.budget = budget
        if budget.probe:
            self._last_probe = self._number
        self._number += 1
        return budget

    def admit(self, confidence: torch.Tensor, draft_lens: torch.Tensor, budget: Budget) -> torch.Tensor:
        bounds = None
        if budget.thresholds is not None:
            bounds = self.past.correction.least(budget.thresholds, bool(budget.draft_mask(np.ones(1))[0]))[None]
        elif budget.threshold:
            drafting = budget.draft_mask(np.ones(len(draft_lens), dtype=np.int64))
            least = [self.past.correction.least(budget.threshold, kind) for kind in (False, True)]
            bounds = np.where(drafting, least[True], least[False])[:, None]
        return largest(confidence, draft_lens, budget.tokens, bounds=bounds, first=budget.first, admit=self.admit_by)

    def observe(self, step: FinishedStep) -> None:
        super().observe(step)
        issued = self._take(step.view)
        if step.looked_up is None and issued.room and issued.budget is not None and issued.budget.look_up:
            self._cannot_look_up = True
        if step.drafting:
            self._resting.end()  # there is something new to be looked at
        if step.drafting or step.looked_up is not None:
            self._finished.append((issued, step))

    def curve(self) -> PlannedCurve | None:
        if self._considered is None:
            return None
        requests, found, best = self._considered
        chosen = best.curve.verified(best.best), float(best.curve.throughput[best.best])
        # Where nobody is to draft and nothing was looked up, that is a point; another shows what drafting would bring.
        shown = best if len(best.curve.throughput) > 1 else max(found, key=lambda each: len(each.curve.throughput))
        return PlannedCurve(shown.curve.tokens, shown.curve.throughput, requests, chosen)

    # -- the decision ---------------------------------------------------------------------------------------------

    def _decide(self, issued: Issued) -> Budget:
        step, room, requests = issued.view, issued.room, len(issued.view.rows)
        seconds = self._seconds(step, room)
        if not room:
            return Budget(draft=False, tokens=0, seconds=seconds)
        samples, deciding = -(-self.smoothing // requests), self.cost.deciding
        survival, taken, known = self._read(self.past.history, step, room, samples)
        free, found_for = None, known
        if self.past.lookups is not None:
            free, _, found_for = self._read(self.past.lookups, step, room, samples)
        able = step.limits > 0

        rest = nobody = self._candidate(step, None, None, seconds)
        found = [rest]
        if free is not None:
            nobody = self._candidate(step, None, free, seconds + deciding)
            found.append(nobody)
        drafted = self.past.discard_rate + (1 - self.past.discard_rate) * taken.mean(0)
        selections, everyone = self._selections(step, survival, taken, drafted, able, seconds, nobody.worth[1])
        for selection in selections:
            theirs, drafting = selection.cut(survival, free, self.block), self._drafting(selection, drafted)
            found.append(
                self._candidate(
                    step, selection, theirs, seconds + (deciding + drafting), (1 - self.required_return) * drafting
                )
            )
        best = max(found, key=lambda candidate: candidate.worth)  # of equals the first, which drafts for fewer
        curve = best.curve
        self._considered = requests, found, best
        self._price, self._verified = float(curve.throughput[best.best]), max(curve.verified(best.best), 1.0)
        first = behind(step.levels, step.progress) if np.count_nonzero(step.levels) else None
        if best.selection is not None:
            self._probing.reset_backoff()
            self._looking.reset_backoff()
            seconds = seconds + (deciding + self._drafting(best.selection, drafted))
            depth = best.selection.depth
            if requests == 1 and curve.values is not None and first is None:
                return Budget(
                    True, room, best.selection.who, 0.0, None, seconds, depth=depth, thresholds=self._thresholds(room)
                )
            threshold = curve.threshold(best.best)
            return Budget(True, self._most(issued, best), best.selection.who, threshold, first, seconds, depth=depth)
        drafting = deciding + self._drafting(everyone, drafted)
        seen = self._number > self._last_probe + LAG
        news, new_texts = (seen and bool((~those & able).any()) for those in (known, found_for))
        if self._probing.due(drafting, float(seconds[0]), news):
            return Budget(draft=True, tokens=0, seconds=seconds + drafting, probe=True, depth=everyone.depth)
        if free is None:
            if not self._cannot_look_up:
                return Budget(draft=False, tokens=0, seconds=seconds[:1])
            return self._rest(step, seconds)
        if best is nobody:
            self._looking.reset_backoff()
        elif not self._looking.due(deciding, float(seconds[0]), new_texts):
            return self._rest(step, seconds)
        return self._look_up(issued, nobody, seconds, probe=best is rest)

    def _rest(self, step: StepView, seconds: np.ndarray) -> Budget:
        """A budget that drafts and looks up nothing. Resting begins once the last probe has been observed."""
        if self._number > self._last_probe + LAG:
            self._resting.begin(step)
        return Budget(draft=False, tokens=0, seconds=seconds[:1], look_up=False)

    def _look_up(self, issued: Issued, nobody: _Candidate, seconds: np.ndarray, probe: bool) -> Budget:
        """A budget that verifies lookups as far as they pay at the throughput of the best plan."""
        step = issued.view
        first = behind(step.levels, step.progress) if np.count_nonzero(step.levels) else None
        expected = seconds + self.cost.deciding
        if self.buckets is not None:
            return Budget(False, self._most(issued, nobody), None, 0.0, first, expected, probe)
        # As many as pay if all are accepted; of these, those that pay by their survival.
        pays = self._price * (seconds - seconds[0]) <= np.arange(len(seconds))
        threshold = max(self._price * self._marginal(seconds), 1 / RESOLUTION)
        return Budget(False, int(pays.nonzero()[0][-1]), None, threshold, first, expected, probe)

    def _most(self, issued: Issued, best: _Candidate) -> int:
        """Budget of draft tokens at the best point."""
        most = best.curve.most(best.best)
        return most if self.buckets is None else self.buckets.fill_bucket(len(issued.view.rows), most, issued.room)

    def _candidate(
        self,
        step: StepView,
        selection: DraftSelection | None,
        survival: np.ndarray | None,
        seconds: np.ndarray,
        uncounted: float = 0.0,
    ) -> _Candidate:
        """The best of the curve of `survival` [samples, R, gamma], None standing for zeros."""
        requests = len(step.rows)
        if survival is None:
            curve = Curve(requests / seconds[:1], seconds[:1])  # nothing to be admitted
        elif self.buckets is not None:
            curve = mean_curve(requests, survival, seconds)
        elif len(survival) == 1:
            curve = single_curve(requests, survival, seconds)
        else:
            curve = pooled_curve(requests, survival, seconds)
        if not np.count_nonzero(step.levels):
            return _Candidate(selection, curve, int(curve.throughput.argmax()), 0, uncounted)
        brought = 1.0 if survival is None else 1.0 + survival.sum(2).mean(0)
        leveled = step.levels > 0
        kept = levels_kept(step.levels[leveled], np.broadcast_to(brought, leveled.shape)[leveled], curve.seconds)
        # With nothing verified everybody gets one token.
        kept[0] = levels_kept(step.levels[leveled], np.ones(int(leveled.sum())), curve.seconds[:1])[0]
        most = int(kept.max())
        best = int(np.where(kept == most, curve.throughput, 0.0).argmax())
        return _Candidate(selection, curve, best, most, uncounted)

    def _selections(
        self,
        step: StepView,
        survival: np.ndarray,
        taken: np.ndarray,
        drafted: np.ndarray,
        able: np.ndarray,
        seconds: np.ndarray,
        least: float,
    ) -> tuple[list[DraftSelection], DraftSelection]:
        """The choices of who drafts that are compared, and everyone.

        The first choice is those whose drafts pay at the throughput of the last plan, or at `least`. With few requests
        everyone is compared as well.
        """
        price = self.required_return * max(self._price, least)
        margin, costs = price * self._marginal(seconds), price * self._draft_curves
        paying, everyone = worth_drafting(survival, taken, drafted, able, margin, costs, self.block)
        if paying is not None and not paying.who.all() and self._number % REFRESH == 0:
            stale = able & (self.past.history.ages(step.rows, step.generations, self._number) > STALE)
            paying = DraftSelection(paying.who | stale, paying.depth)
        few = len(able) < FEW
        if paying is None or (few and np.array_equal(paying.who, able) and paying.depth == everyone.depth):
            return ([everyone] if few else []), everyone
        return ([paying, everyone] if few else [paying]), everyone

    def _drafting(self, selection: DraftSelection, drafted: np.ndarray) -> float:
        """Mean seconds of these drafts."""
        costs = self._draft_curves[-1 if selection.depth is None else selection.depth - 1]
        return float(cost_of(costs, drafted[selection.who].sum()))

    def _thresholds(self, room: int) -> np.ndarray:
        """[gamma] least survival of each token of a lone request; the first tokens cost less, so theirs is lower."""
        worth = np.full(self.gamma, np.inf)
        worth[:room] = self._price * np.diff(convex(self._curve[: room + 1]))
        return np.maximum(worth, 1 / RESOLUTION)

    def _marginal(self, seconds: np.ndarray) -> float:
        """Mean seconds that a further token adds, over as many tokens as the last plan verified, or a block."""
        reach = min(max(int(self._verified), self.gamma), len(seconds) - 1)
        return max(float(seconds[reach] - seconds[0]) / reach, 0.0)

    def _read(
        self, history: SurvivalHistory, step: StepView, room: int, samples: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`SurvivalHistory.read`, cut to the limits."""
        survival, drafted, known = history.read(step.rows, step.generations, samples, step.groups)
        if room < self.gamma * len(step.rows):
            survival *= self._positions < step.limits[:, None]
        return survival, drafted, known

    def _seconds(self, step: StepView, room: int) -> np.ndarray:
        """[room+1] seconds with 0..room admitted tokens, without drafting; not to be written to."""
        requests = len(step.rows)
        if requests != self._curve_requests or room >= len(self._curve) or self._number - self._curve_step >= REFRESH:
            tokens = np.arange(requests, requests + room + 1)
            if self.buckets is not None:
                tokens = self.buckets.round_up_each(tokens)
            self._curve = self.cost.seconds(requests, tokens, float(step.contexts.sum()))
            shares = np.ones(1) if self.block is None else np.arange(1, self.block + 1) / self.block
            self._draft_curves = self.cost.draft_curves(requests, shares)
            self._curve_requests, self._curve_step = requests, self._number
        return self._curve[: room + 1]

    # -- the past -------------------------------------------------------------------------------------------------

    def _take(self, step: StepView) -> Issued:
        """The plan of `step`. Earlier steps that were not observed are dropped."""
        while self._issued:
            issued = self._issued.popleft()
            if issued.view is step:
                return issued
        raise ValueError("observe() wants a step whose view budget() was given, each once and in step order")

    def _absorb(self) -> None:
        """Learn from finished steps that are at least LAG before the step to be planned."""
        while self._finished and self._finished[0][0].number <= self._number - LAG:
            self.past.absorb(*self._finished.popleft(), self.block)
