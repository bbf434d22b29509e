"""The planner's place in a decode step: what it is asked, what it is shown, what is recorded of it.

A step's outcome is read at once where tensors live on the host, and on a GPU when the step after the next begins, by
when it has long been computed, so that the planner never makes the device wait.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from outrider.drafters.base import Draft
from outrider.scheduler.calibration.model import Calibration
from outrider.scheduler.calibration.records import Recorder
from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.planners.admission import survival_of
from outrider.scheduler.planners.base import Budget, Planner, StepView
from outrider.server.plugin.decode.metrics import SpeculationMetrics
from outrider.server.plugin.decode.requests import RequestTable

DEVICE_LAG = 1
"""Steps that are still under way on a GPU when the next one is prepared; their results are not read yet."""
RECORDED_REQUEST_STEPS = 1 << 15
RECORDED_STEPS = 1 << 12


@dataclass(slots=True)
class Step:
    """One decode step of R requests, filled in as it goes.

    view, budget: what the planner was asked and said. drafts: whether anybody drafts.
    planned, padded: [R] bool, requests it decides for, and requests whose drafts are filled up to their limit.
    raw, confidence: [R, gamma] as the drafter gave them, and calibrated. draft_lens, verify_lens, accept_lens: [R].
    tokens: verified over all requests, anchors included; None until the outcome was read.
    seconds: until the next decode step began; None until then, or where something else came between.
    """

    view: StepView
    budget: Budget
    drafts: bool
    planned: np.ndarray
    padded: np.ndarray
    temperatures: torch.Tensor
    began: float
    planner_seconds: float
    draft_seconds: float = 0.0
    raw: torch.Tensor | None = None
    confidence: torch.Tensor | None = None
    draft_lens: torch.Tensor | None = None
    verify_lens: torch.Tensor | None = None
    accept_lens: torch.Tensor | None = None
    tokens: int | None = None
    seconds: float | None = None


@dataclass(slots=True)
class StepLog:
    """The last steps, for measuring what a step costs: lists of equal length, oldest first."""

    requests: deque[int] = field(default_factory=lambda: deque(maxlen=RECORDED_STEPS))
    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=RECORDED_STEPS))
    context: deque[int] = field(default_factory=lambda: deque(maxlen=RECORDED_STEPS))
    drafted: deque[bool] = field(default_factory=lambda: deque(maxlen=RECORDED_STEPS))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECORDED_STEPS))
    draft_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECORDED_STEPS))

    def add(self, step: Step) -> None:
        """Log a finished step whose time is known."""
        assert step.seconds is not None
        assert step.tokens is not None
        self.requests.append(len(step.view.rows))
        self.tokens.append(step.tokens)
        self.context.append(int(step.view.contexts.sum()))
        self.drafted.append(step.drafts)
        self.seconds.append(step.seconds)
        self.draft_seconds.append(step.draft_seconds)

    def clear(self) -> None:
        for name in self.__slots__:
            getattr(self, name).clear()

    def to_lists(self) -> dict[str, list[Any]]:
        """What can be sent to another process."""
        return {name: list(getattr(self, name)) for name in self.__slots__}


class Scheduling:
    """Asks the planner before a step, tells it afterwards.

    planner: decides for requests that leave the decision to it. cost: corrected by the times that steps take; None
    where nothing was measured. calibration: of the drafter's confidences; None takes them as they are.
    """

    def __init__(
        self,
        planner: Planner,
        cost: StepCost | None,
        calibration: Calibration | None,
        requests: RequestTable,
        metrics: SpeculationMetrics,
        device: Any,
    ):
        self.planner = planner
        self.cost = cost
        self.calibration = calibration
        self.requests = requests
        self.metrics = metrics
        self.on_host = torch.device(device).type == "cpu"
        self.pending: deque[Step] = deque()
        self.last: Step | None = None
        self.running = np.empty(0, dtype=np.int64)
        self.records = Recorder(RECORDED_REQUEST_STEPS, requests.gamma)
        self.steps = StepLog()

    def begin(self, rows: np.ndarray, contexts: np.ndarray, temperatures: torch.Tensor) -> Step:
        """A decode step begins: its budget, from what earlier steps showed."""
        now = time.perf_counter()
        if self.last is not None:
            self.last.seconds = now - self.last.began
            self._time(self.last)
        self._catch_up(DEVICE_LAG)
        self._see_off(rows)
        asked = time.perf_counter()
        view = self.requests.view(rows, contexts)
        budget = self.planner.budget(view)
        table = self.requests
        planned, may_draft = table.planned[rows], view.limits > 0
        step = Step(
            view=view,
            budget=budget,
            drafts=bool((may_draft & (budget.draft | ~planned)).any()),
            planned=planned,
            padded=table.padded[rows],
            temperatures=temperatures,
            began=now,
            planner_seconds=time.perf_counter() - asked,
        )
        self.last = step
        return step

    def admit(self, step: Step, draft: Draft) -> torch.Tensor:
        """verify_lens [R] of a step's drafts."""
        began = time.perf_counter()
        step.raw = draft.confidence
        step.confidence = draft.confidence if self.calibration is None else self.calibration.apply(draft.confidence)
        step.draft_lens = draft.lens
        if not step.drafts:
            verify_lens = torch.zeros_like(draft.lens)
        elif step.planned.all():
            verify_lens = self.planner.admit(step.confidence, draft.lens, step.budget)
        else:
            planned = torch.from_numpy(step.planned).to(draft.lens.device)
            open_lens = draft.lens * planned if step.budget.draft else torch.zeros_like(draft.lens)
            admitted = self.planner.admit(step.confidence, open_lens, step.budget)
            verify_lens = torch.where(planned, admitted, draft.lens)
        step.verify_lens = verify_lens
        step.planner_seconds += time.perf_counter() - began
        return verify_lens

    def finish(self, step: Step, accept_lens: torch.Tensor) -> None:
        """A step's tokens are decided: accept_lens [R], the bonus token included."""
        step.accept_lens = accept_lens
        self.pending.append(step)
        if self.on_host:
            self._catch_up(0)

    def interrupt(self, rows: np.ndarray) -> None:
        """Requests are prefilled into `rows` next, so how long the last step took cannot be told."""
        self.last = None
        self.metrics.flush()
        self._see_off(np.setdiff1d(self.running, rows))

    def _see_off(self, rows: np.ndarray) -> None:
        """Only `rows` are left of the step before: did those that have gone get the speed that they asked for?"""
        if np.array_equal(self.running, rows):
            return
        gone = np.setdiff1d(self.running, rows)
        self.running = rows
        if len(gone):
            table = self.requests
            self.metrics.observe_requests(table.levels[gone], table.speeds(gone), table.generated[gone])

    def _catch_up(self, lag: int) -> None:
        while len(self.pending) > lag:
            self._observe(self.pending.popleft())

    def _observe(self, step: Step) -> None:
        assert step.raw is not None
        assert step.confidence is not None
        assert step.draft_lens is not None
        assert step.verify_lens is not None
        assert step.accept_lens is not None
        began = time.perf_counter()
        verify_lens, accept_lens = step.verify_lens.cpu().numpy(), step.accept_lens.cpu().numpy()
        confidence = step.confidence.float().cpu()
        survival = survival_of(confidence, step.draft_lens.cpu()).numpy()
        self.planner.observe(step.view, survival, verify_lens, accept_lens, step.drafts, None)
        self.requests.take(step.view, accept_lens)
        step.planner_seconds += time.perf_counter() - began
        if (tried := verify_lens > 0).any():
            raw, temperatures = step.raw.float().cpu().numpy(), step.temperatures.cpu().numpy()
            self.records.record(raw[tried], verify_lens[tried], accept_lens[tried] - 1, temperatures[tried])
        step.tokens = len(verify_lens) + int(verify_lens.sum())
        self.metrics.observe_step(step, confidence.numpy(), step.draft_lens.cpu().numpy(), verify_lens, accept_lens)
        self._time(step)

    def _time(self, step: Step) -> None:
        """Take in how long a step took, once that and its outcome are both known."""
        if step.seconds is None or step.tokens is None:
            return
        self.steps.add(step)
        requests, drafted = len(step.view.rows), step.drafts
        predicted = step.budget.predicted_seconds(step.tokens - requests)
        if self.cost is not None:
            self.cost.observe(requests, step.tokens, float(step.view.contexts.sum()), drafted, step.seconds)
        self.metrics.observe_time(step.seconds, predicted)

    def state(self) -> dict[str, Any]:
        """Everything recorded since `forget`, in types that can be sent to another process."""
        self._catch_up(0)
        self.metrics.flush()
        records = self.records.records()
        return {
            "steps": self.steps.to_lists(),
            "records": {
                "confidence": records.confidence.tolist(),
                "verify_lens": records.verify_lens.tolist(),
                "accepted": records.accepted.tolist(),
                "temperatures": records.temperatures.tolist(),
            },
        }

    def forget(self) -> None:
        """Drop what was recorded."""
        self._catch_up(0)
        self.records = Recorder(RECORDED_REQUEST_STEPS, self.requests.gamma)
        self.steps.clear()
