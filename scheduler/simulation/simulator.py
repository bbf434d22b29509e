"""A discrete-event simulation of a server that decodes with a planner, to try policies without hardware.

One event is one decode step, as the engine runs it: the planner gives a budget from what it has observed, the drafter's
confidences appear, the planner admits, the cost model says how long the step takes, tokens come out. Everything is
arrays over the running requests, so that ten thousand of them are simulated in reasonable time.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from ..cost.model import StepCost
from ..planners.admission import survival_of
from ..planners.base import FinishedStep, Planner, StepView
from .workload import Acceptance, Requests, Workload

WARM_UP = 0.2
"""Share of the simulated time before anything counts."""


@dataclass(slots=True)
class Totals:
    """Sums over the time that counts. tokens: that requests received; emitted: by steps, which may overshoot an end.

    planner_seconds: processor time of the planner, real and not simulated.
    """

    seconds: float = 0.0
    steps: int = 0
    drafted_steps: int = 0
    request_steps: int = 0
    verified: int = 0
    accepted: int = 0
    emitted: int = 0
    tokens: int = 0
    planner_seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Result:
    """Results of a simulation; `speeds` to `levels` have one entry per finished request.

    speeds: tokens per second from its first token on. waits: seconds from its arrival to its first token.
    tokens: it received. levels: tokens per second that it asked for; 0: none.
    """

    totals: Totals
    speeds: np.ndarray
    waits: np.ndarray
    tokens: np.ndarray
    levels: np.ndarray

    def summary(self) -> dict[str, float]:
        """Numbers for a table; NaN where nothing finished. Speeds are in tokens per second, times in seconds."""
        t = self.totals
        met = self.speeds >= self.levels
        throughput = _ratio(t.tokens, t.seconds)
        return {
            "throughput": throughput,
            "speed_mean": _mean(self.speeds),
            "speed_p50": _quantile(self.speeds, 0.5),
            "speed_p1": _quantile(self.speeds, 0.01),
            "wait_mean": _mean(self.waits),
            "wait_p99": _quantile(self.waits, 0.99),
            "concurrency": _ratio(t.request_steps, t.steps),
            "accepted_length": _ratio(t.emitted, t.request_steps),
            "verified_per_request": 1 + _ratio(t.verified, t.request_steps),
            "wasted": (t.verified - t.accepted) / t.verified if t.verified else 0.0,
            "not_drafted": 1 - _ratio(t.drafted_steps, t.steps),
            "attainment": _mean(met[self.levels > 0]),
            "goodput": throughput * _ratio(float(self.tokens[met].sum()), float(self.tokens.sum())),
            "finished": float(len(self.speeds)),
            "planner_us": 1e6 * _ratio(t.planner_seconds, t.steps),
        }


class _Slots:
    """The running requests, one per slot. generated: tokens so far. arrived, first: times of arrival, first token."""

    def __init__(self, count: int):
        self.busy = np.zeros(count, dtype=bool)
        self.number, self.prompt, self.output, self.generated = np.zeros((4, count), dtype=np.int64)
        self.difficulty, self.drift, self.level, self.arrived, self.first = np.zeros((5, count))


class Simulation:
    """A server with one planner under one workload.

    planner: sees the past and the present step's confidences, as in the engine; it needs a cost model of its own.
    cost: how long steps really take. noise: standard deviation of the logarithm of a step's time around that.
    seed: the same seed brings the same requests to every planner, and the same result to the same planner.
    """

    def __init__(
        self,
        planner: Planner,
        cost: StepCost,
        acceptance: Acceptance,
        workload: Workload,
        *,
        seed: int = 0,
        noise: float = 0.02,
    ):
        self.planner, self.cost, self.acceptance, self.workload, self.noise = planner, cost, acceptance, workload, noise
        self.now = 0.0
        self.totals = Totals()
        self._rng = np.random.default_rng([seed, 100])
        self._requests = Requests(workload, seed)
        self._next_arrival = next(self._requests.arrivals, math.inf)
        self._waiting: deque[float] = deque()  # arrival times
        self._number = 0
        closed = workload.arrivals == "closed"
        self._slots = _Slots(min(workload.max_running, workload.concurrency) if closed else workload.max_running)

    def run(self, seconds: float, progress: Callable[[float], None] | None = None) -> Result:
        """Simulate `seconds`; `progress` is told the seconds that each step adds. To be called once."""
        finished: list[np.ndarray] = []
        counting_since = math.inf
        while self.now < seconds:
            before = self.now
            if math.isinf(counting_since) and before >= WARM_UP * seconds:
                counting_since, self.totals, finished = before, Totals(), []
            self._admit()
            active = np.flatnonzero(self._slots.busy)
            if len(active):
                finished.append(self._step(active))
            elif math.isinf(self._next_arrival):
                break
            else:
                self.now = self._next_arrival
            if progress is not None:
                progress(min(self.now, seconds) - before)
        self.totals.seconds = self.now - min(counting_since, self.now)
        speeds, waits, tokens, levels = np.concatenate(finished, axis=1) if finished else np.zeros((4, 0))
        return Result(self.totals, speeds, waits, tokens, levels)

    def _admit(self) -> None:
        """Let waiting requests in, in order of arrival, and prefill them."""
        slots = self._slots
        while self._next_arrival <= self.now:
            self._waiting.append(self._next_arrival)
            self._next_arrival = next(self._requests.arrivals, math.inf)
        count = min(len(self._waiting), len(slots.busy) - int(np.count_nonzero(slots.busy)))
        if not count:
            return
        free = np.flatnonzero(~slots.busy)[:count]
        drawn = self._requests.draw(count)
        slots.busy[free] = True
        slots.number[free] = np.arange(self._number, self._number + count)
        for name in ("prompt", "output", "difficulty", "level"):
            getattr(slots, name)[free] = drawn[name]
        slots.drift[free] = self._rng.standard_normal(count)
        slots.arrived[free] = [self._waiting.popleft() for _ in range(count)]
        if self._number == 0 and self.workload.arrivals == "closed":
            # The users do not start together: their first requests are at any stage of their answers.
            done = (drawn["output"] * self._rng.random(count)).astype(np.int64)
            slots.prompt[free] += done
            slots.output[free] = np.maximum(drawn["output"] - done, 2)
        else:
            self.now += self.workload.prefill_seconds * int(drawn["prompt"].sum())
        self._number += count
        slots.generated[free] = 1
        slots.first[free] = self.now
        self.totals.tokens += count

    def _step(self, active: np.ndarray) -> np.ndarray:
        """One decode step of the requests in slots `active` [R]; [4, n] the columns of Result of those it finished."""
        slots, gamma, totals = self._slots, self.acceptance.gamma, self.totals
        view = self._view(active)
        began = time.process_time()
        budget = self.planner.budget(view)
        planning = time.process_time() - began
        slots.drift[active] = self.acceptance.drift_step(slots.drift[active], self._rng)
        verify_lens = np.zeros(len(active), dtype=np.int64)
        survival = np.zeros((len(active), gamma), dtype=np.float32)
        runs = verify_lens
        draft_mask = budget.draft_mask(view.limits)
        drafting = int(np.count_nonzero(draft_mask))
        if drafting:
            confidence, chances = self.acceptance.draft(slots.difficulty[active], slots.drift[active], self._rng)
            shown = torch.from_numpy(confidence.astype(np.float32))
            began = time.process_time()
            draft_lens = torch.from_numpy(gamma * draft_mask)
            verify_lens = self.planner.admit(shown, draft_lens, budget).numpy()
            planning += time.process_time() - began
            survival = survival_of(shown, draft_lens).numpy()
            # Drawn for all positions and after admission: what was admitted cannot depend on it, nor it on that.
            kept = (self._rng.random(chances.shape) < chances).cumprod(1).sum(1)
            runs = np.minimum(kept, verify_lens)
        accept_lens = runs + 1
        seconds = self._step_seconds(view, int(verify_lens.sum()), drafting)
        self.now += seconds
        began = time.process_time()
        tokens = len(active) + int(verify_lens.sum())
        self.planner.observe(
            FinishedStep(view, survival, verify_lens, accept_lens, draft_mask, drafting, tokens=tokens, seconds=seconds)
        )
        planning += time.process_time() - began

        received = np.minimum(accept_lens, slots.output[active] - slots.generated[active])
        slots.generated[active] += received
        totals.steps += 1
        totals.drafted_steps += drafting > 0
        totals.request_steps += len(active)
        totals.verified += int(verify_lens.sum())
        totals.accepted += int(runs.sum())
        totals.emitted += int(accept_lens.sum())
        totals.tokens += int(received.sum())
        totals.planner_seconds += planning
        return self._finish(active[slots.generated[active] >= slots.output[active]])

    def _view(self, active: np.ndarray) -> StepView:
        slots = self._slots
        generated = slots.generated[active]
        with np.errstate(divide="ignore", invalid="ignore"):  # of requests that have just started
            progress = np.where(generated > 1, (generated - 1) / (self.now - slots.first[active]), np.inf)
        return StepView(
            rows=active,
            generations=slots.number[active],
            contexts=slots.prompt[active] + generated - 1,  # the anchor is not in the cache yet
            limits=np.full(len(active), self.acceptance.gamma),
            levels=slots.level[active],
            progress=progress,
        )

    def _step_seconds(self, view: StepView, admitted: int, drafting: int) -> float:
        requests = len(view.rows)
        tokens = np.array([requests + admitted])
        seconds = float(self.cost.seconds(requests, tokens, float(view.contexts.sum()))[0])
        seconds += self.cost.draft_seconds(drafting) if drafting else 0.0
        return seconds * math.exp(self.noise * self._rng.standard_normal())

    def _finish(self, done: np.ndarray) -> np.ndarray:
        slots = self._slots
        slots.busy[done] = False
        if self.workload.arrivals == "closed":
            self._waiting.extend([self.now] * len(done))
        speeds = (slots.output[done] - 1) / (self.now - slots.first[done])
        waits = slots.first[done] - slots.arrived[done]
        return np.stack([speeds, waits, slots.output[done], slots.level[done]])


def _ratio(above: float, below: float) -> float:
    return above / below if below else math.nan


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _quantile(values: np.ndarray, q: float) -> float:
    return float(np.quantile(values, q)) if len(values) else math.nan
