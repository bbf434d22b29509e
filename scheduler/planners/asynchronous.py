"""The asynchronous planner (DSpark, section 5.2), with not drafting as a choice and service levels.

The budget K is the best point of the whole, possibly jagged, throughput curve

    Theta(K) = (R + sum of the K largest survivals) / (T(R, R + K, context) + T_draft(R))

for the survivals of two steps ago, against R / T(R, R, context) for a step without drafting. Admission is then the
top-K by current survival. Searching the whole curve is lossless only because it never reads the current step
(appendix A). It does not read the confidences of the step before either, which on a GPU is still running. Every step
must draw with random numbers of its own, otherwise the past would know of the present.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.planners.admission import survival_of, top_k
from outrider.scheduler.planners.base import Budget, Planner, StepView
from outrider.scheduler.planners.probing import Probing
from outrider.scheduler.planners.sorting import RESOLUTION, largest
from outrider.scheduler.planners.survival_history import Correction, SurvivalHistory
from outrider.scheduler.service_levels import behind, levels_kept

LAG = 2
"""A budget sees steps that are at least this many before it."""
PROBE_WEIGHT = 4
"""What a probe shows counts as so many steps: what was seen before it is old by then."""
REFRESH = 8
"""Steps for which predicted times are kept while the number of requests stays: context and drift move slowly."""
LATE = 64
"""Steps that may be unobserved at a time."""


@dataclass(slots=True)
class _Issued:
    """A step that was planned. room: most draft tokens, over all requests."""

    number: int
    view: StepView
    room: int
    probe: bool = False


class Asynchronous(Planner):
    """Budget from the past, top-K by the present.

    gamma: width of the confidences.
    smoothing: with fewer requests than this, the curve is the mean over several past steps of each, so that one
        unlucky draft of a lone request does not decide; 1: the step of two ago alone.
    """

    def __init__(self, cost: StepCost, gamma: int, *, smoothing: int = 64):
        if gamma < 1 or smoothing < 1:
            raise ValueError(f"gamma and smoothing are at least 1, not {gamma} and {smoothing}")
        self.cost = cost
        self.gamma = gamma
        self.smoothing = smoothing
        self.history = SurvivalHistory(gamma)
        self.correction = Correction(gamma)
        self._probing = Probing()
        self._number = 0
        self._last_probe = -LAG
        self._issued: deque[_Issued] = deque(maxlen=LATE)
        # Drafted and observed, not yet LAG steps old: with survival, verify_lens, accept_lens.
        self._finished: deque[tuple[_Issued, np.ndarray, np.ndarray, np.ndarray]] = deque()
        self._positions = np.arange(gamma)
        self._curve = np.zeros(1)  # seconds by admitted tokens, without drafting; for:
        self._curve_requests, self._curve_step = 0, 0

    def budget(self, step: StepView) -> Budget:
        self._absorb()
        issued = _Issued(self._number, step, int(np.add.reduce(step.limits)))
        self._issued.append(issued)
        budget = self._decide(issued)
        if budget.probe:
            issued.probe, self._last_probe = True, self._number
        self._number += 1
        return budget

    def admit(self, confidence: torch.Tensor, draft_lens: torch.Tensor, budget: Budget) -> torch.Tensor:
        return top_k(survival_of(confidence, draft_lens), budget.tokens, budget.first)

    def observe(
        self,
        step: StepView,
        survival: np.ndarray,
        verify_lens: np.ndarray,
        accept_lens: np.ndarray,
        drafted: bool,
        seconds: float | None,
    ) -> None:
        issued = self._take(step)
        if seconds is not None:
            requests, context = len(step.rows), float(np.add.reduce(step.contexts))
            self.cost.observe(requests, requests + int(np.add.reduce(verify_lens)), context, drafted, seconds)
        if drafted:
            self._finished.append((issued, survival, verify_lens, accept_lens))

    # -- the decision ---------------------------------------------------------------------------------------------

    def _decide(self, issued: _Issued) -> Budget:
        step, room, requests = issued.view, issued.room, len(issued.view.rows)
        curve = self._seconds(step, room)
        plain = float(curve[0])
        if not room:
            return Budget(draft=False, tokens=0, seconds=curve)
        seconds = curve + self.cost.draft_seconds(requests)

        survival, known = self.history.read(step.rows, step.generations, -(-self.smoothing // requests))
        survival *= self.correction.factors
        if room < self.gamma * requests:
            survival *= self._positions < step.limits[:, None]
        brought = 1.0 + survival.sum(2).mean(0) if np.count_nonzero(step.levels) else None
        throughput = throughput_curve(requests, room, survival, seconds)
        plain_throughput = requests / plain
        first = None
        if brought is not None:
            asked, first = step.levels > 0, behind(step.levels, step.progress)
            kept = levels_kept(step.levels[asked], brought[asked], seconds)
            plain_kept = levels_kept(step.levels[asked], np.ones(int(asked.sum())), curve[:1])[0]
            most = max(kept.max(), plain_kept)
            throughput = np.where(kept == most, throughput, 0.0)
            plain_throughput = plain_throughput if plain_kept == most else -1.0
        tokens = int(throughput.argmax())
        if throughput[tokens] > plain_throughput:
            return Budget(draft=True, tokens=tokens, first=first, seconds=seconds)
        news = self._number > self._last_probe + LAG and bool((~known & (step.limits > 0)).any())
        if self._probing.due(float(seconds[0]) - plain, plain, news):
            return Budget(draft=True, tokens=0, seconds=seconds, probe=True)
        return Budget(draft=False, tokens=0, seconds=curve[:1])

    def _seconds(self, step: StepView, room: int) -> np.ndarray:
        """[room+1] seconds with 0..room admitted tokens, without drafting; not to be written to."""
        requests = len(step.rows)
        if requests != self._curve_requests or room >= len(self._curve) or self._number - self._curve_step >= REFRESH:
            tokens = np.arange(requests, requests + room + 1)
            self._curve = self.cost.seconds(requests, tokens, float(step.contexts.sum()))
            self._curve_requests, self._curve_step = requests, self._number
        return self._curve[: room + 1]

    # -- the past -------------------------------------------------------------------------------------------------

    def _take(self, step: StepView) -> _Issued:
        """What was planned for `step`; steps before it that were not observed are given up."""
        while self._issued:
            issued = self._issued.popleft()
            if issued.view is step:
                return issued
        raise ValueError("observe() wants the StepView that budget() was given, each once and in step order")

    def _absorb(self) -> None:
        """Learn from the finished steps that the step about to be planned may know of."""
        while self._finished and self._finished[0][0].number <= self._number - LAG:
            issued, survival, verify_lens, accept_lens = self._finished.popleft()
            self.correction.observe(survival, verify_lens, accept_lens, fade=issued.probe)
            rows, generations = issued.view.rows, issued.view.generations
            if issued.room < self.gamma * len(rows):  # nothing was drafted for requests that have it switched off
                on = issued.view.limits > 0
                rows, generations, survival = rows[on], generations[on], survival[on]
            for _ in range(PROBE_WEIGHT if issued.probe else 1):
                self.history.write(rows, generations, survival)


def throughput_curve(requests: int, room: int, survival: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """[room+1] float64 Theta(K) in tokens per second for K = 0..room admitted tokens.

    survival: [samples, R, gamma], overwritten; the expectation of tokens and of seconds is taken over the samples.
        Entries of 0 are never admitted, so a sample that has n others takes the seconds of min(K, n).
        Counted in steps of 1 / RESOLUTION, see `largest`.
    seconds: [room+1] of a step with K admitted tokens.
    """
    samples = len(survival)
    ordered = largest(survival.reshape(samples, -1), room)
    tokens = np.empty(room + 1)
    tokens[0] = requests * RESOLUTION
    if samples == 1:
        tokens[1:] = ordered[0]
    else:
        np.add.reduce(ordered, axis=0, out=tokens[1:], dtype=np.float64)
        tokens[1:] /= samples
    torch.from_numpy(tokens).cumsum_(0)  # several times as fast as numpy's
    tokens *= 1 / RESOLUTION
    if room and np.count_nonzero(ordered[:, -1]) < samples:
        useful = np.count_nonzero(ordered, axis=1)[:, None]
        seconds = seconds[np.minimum(np.arange(room + 1), useful)].mean(0)
    return tokens / seconds
