"""Stage 2, plan: the planner decides how many drafts are verified, and learns from outcomes.

Outcomes are read in batches, before the planner learns or metrics are written: a forward evicts this code from the
caches, so reading three outcomes costs about as much as reading one. On a GPU SGLang copies them to the host with the
step's tokens. The planner never waits for the device, nor the device for the planner.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from outrider.drafters.base import Draft
from outrider.kernels.drafts import Parameters, survival_of, weigh_drafts
from outrider.kernels.upload import upload
from outrider.scheduler.buckets import TokenBuckets
from outrider.scheduler.calibration.classes import looked_up
from outrider.scheduler.calibration.online import OnlineCalibration
from outrider.scheduler.calibration.table import CalibrationTable, parameters_of_each
from outrider.scheduler.contract import Budget, FinishedStep, PlannedCurve, Planner, StepView

from ..cuda.readback import Readback, StepEnd
from . import live
from .boundary import Boundary
from .metrics import SpeculationMetrics
from .optional.part import OptionalParts
from .requests import Entries, RequestTable
from .step import Admission, Recording, Step, StepDrafts, StepTime

INTS, FLOATS = ("verify_lens", "draft_lens", "ends", "classes"), ("raw", "confidence")
"""Tensors of an admission."""
MOST_UNREAD = 16
"""Most steps with unread outcomes."""


class StepPlanner:
    """Runs the planner around each decode step: requests a budget before it, reports outcomes after it.

    calibration: of the drafter's confidences; None takes them as they are. device: of the steps' tensors.
    buckets: sizes that a step may have; None: any. block, draft_sizes: as in `Planner`.
    corrects: outcomes correct the calibration of the model's drafts while serving (`Drafter.assesses_itself`).
    parts: receive the outcomes, `metrics` among them; None: `metrics` alone.
    """

    def __init__(
        self, planner: Planner, calibration: CalibrationTable | None, requests: RequestTable,
        metrics: SpeculationMetrics, device: Any, buckets: TokenBuckets | None = None, block: int | None = None,
        draft_sizes: Sequence[int] = (), corrects: bool = False, parts: OptionalParts | None = None,
    ):  # fmt: skip
        self.buckets, self.block, self.draft_sizes = buckets, block, draft_sizes
        self.requests = requests
        self.view: Callable[[Entries, np.ndarray, int], StepView] = requests.view
        self.metrics, self.parts = metrics, parts or OptionalParts(Boundary(), [metrics])
        self.optional = self.parts.optional
        self.on_host = torch.device(device).type == "cpu"
        self.recording = Recording(requests.gamma)
        self.corrects = corrects
        self._take(planner, calibration)
        self._last: StepDrafts | None = None  # the step that lasts until the next one begins; None: it cannot be timed
        # On a GPU: the end of the last step, and of the one before the current step; None: other work came between.
        self._ended: StepEnd | None = None
        self._before: StepEnd | None = None
        self._unread: deque[StepDrafts] = deque()  # arrived
        self._read_steps: deque[tuple[StepDrafts, FinishedStep]] = deque()  # may not be over yet
        # Of a step without drafts, on a GPU's host: no drafts, and a token of each request.
        self._none, self._one_each = Draft.nothing(0, requests.gamma, "cpu"), torch.ones(0).long()
        self._learning = 0.0  # seconds for which the planner learned, counted with the step that is read next

    def plan_by(self, planner: Planner, calibration: CalibrationTable | None) -> None:
        """Plan by these from the next step on. Outcomes of earlier steps go to the planner that planned them."""
        self._last = self._ended = None
        self._catch_up()
        self._take(planner, calibration)

    def _take(self, planner: Planner, calibration: CalibrationTable | None) -> None:
        planner.buckets, planner.block, planner.draft_sizes = self.buckets, self.block, self.draft_sizes
        self.planner, self.calibration = planner, calibration
        sources = ("model", "across") if self.corrects else ("across",)
        self.online = OnlineCalibration(self.requests.gamma, calibration, sources)

    def begin(self, rows: np.ndarray, contexts: np.ndarray, classes: torch.Tensor, unsure: int = 0) -> Step:
        """Begin a decode step: plan its budget from earlier outcomes. contexts, unsure: see `RequestTable.view`.
        classes: as in `Step`."""
        now = time.perf_counter()
        if self._last is not None:
            self._last.seconds = now - self._last.step.began
            self._last = None
        self._before, self._ended = self._ended, None
        entries = self.requests.entries(rows)
        if entries.any_level:  # service levels depend on the tokens so far
            self._catch_up()
        view = self.view(entries, contexts, unsure)
        if self.planner.looks_back(view) or len(self._unread) > MOST_UNREAD:
            self._catch_up()
        called = time.perf_counter()
        budget = self.planner.budget(view)
        draft_mask = budget.draft_mask(view.limits)
        if not entries.all_planned:
            draft_mask = np.where(entries.planned, draft_mask, view.limits > 0)
        bucket = None if self.buckets is None else self._bucket(self.buckets, view, entries, budget)
        seconds = time.perf_counter() - called
        return Step(self.planner, view, budget, draft_mask, entries, classes, now, seconds, bucket)

    def _bucket(self, buckets: TokenBuckets, view: StepView, entries: Entries, budget: Budget) -> int:
        """Return the smallest bucket that holds any possible admission."""
        if budget.tokens is None:
            raise ValueError(
                f"{type(self.planner).__name__} sets no bound, and a step has a size that is decided before"
            )
        room = int(view.limits.sum())
        planned = room if entries.all_planned else int(view.limits[entries.planned].sum())
        return buckets.round_up(len(view.rows) + min(budget.tokens, planned) + room - planned)

    def least_bucket(self, requests: int) -> int | None:
        """Return the tokens of a step that verifies anchors alone; None: as many as requests."""
        return None if self.buckets is None else self.buckets.round_up(requests)

    def admit(self, step: Step, draft: Draft, draft_seconds: float | None) -> Admission:
        """Decide how many draft tokens of each request are verified. draft_seconds: as in `Admission`."""
        began = time.perf_counter()
        classes, ends, draft_lens, confidence = step.classes, None, draft.lens, draft.confidence
        verify_lens = draft.lens  # without drafts
        if step.drafts or draft.looked_up is not None:
            if draft.looked_up is not None:  # the classes of `SOURCES` follow the model's in its order
                classes = classes + draft.looked_up
                if draft.across is not None:
                    classes = classes + draft.across
                if draft.by_grammar is not None:
                    classes = classes + 2 * draft.by_grammar
            rows = self.requests.sent_rows.of(step.view.rows, draft.lens.device)
            calibrated_as, parameters = self._parameters(draft.confidence, classes, step.entries)
            confidence, ends = weigh_drafts(
                draft.tokens, draft.confidence, calibrated_as, rows, self.requests.ends, parameters
            )
            draft_lens = torch.minimum(draft.lens, ends)  # tokens after the end of an answer are ignored
            if step.entries.all_planned:
                verify_lens = self.planner.admit(confidence, draft_lens, step.budget)
            else:  # and all drafts of requests that the planner does not decide for
                planned = upload(step.entries.planned, draft_lens.device)
                admitted = self.planner.admit(confidence, draft_lens * planned, step.budget)
                verify_lens = torch.where(planned, admitted, draft_lens)
        return Admission(
            step=step, classes=classes, ends=ends, draft_lens=draft_lens, raw=draft.confidence, confidence=confidence,
            verify_lens=verify_lens, drafting=draft.drafting, looked_up=draft.looked_up, draft_seconds=draft_seconds,
            planner_seconds=step.planner_seconds + time.perf_counter() - began,
        )  # fmt: skip

    def _parameters(
        self, confidence: torch.Tensor, classes: torch.Tensor, entries: Entries
    ) -> tuple[torch.Tensor, Parameters | None]:
        """Return each request's place [R] in the parameters of the batch's calibrations, and these parameters (None:
        uncalibrated). confidence: [R, gamma]. classes: [R]."""
        tables = self.parts.tables(entries, self.calibration, confidence.shape[1])
        if tables is not None:
            return parameters_of_each(tables, confidence, classes)
        if self.calibration is None:
            return classes, None
        return classes, self.calibration.parameters(confidence.shape[1], confidence.device)

    def finish(self, admission: Admission, accept_lens: torch.Tensor) -> Readback | None:
        """Queue a step's outcome; on a GPU, return what SGLang copies to the host, then it is queued. accept_lens: [R],
        the bonus token included."""
        if self.on_host:
            self._last = StepDrafts(admission, accept_lens)
            self._unread.append(self._last)
            return None
        self._ended = StepEnd(accept_lens.device, self._before)
        if admission.ends is None:
            return Readback(partial(self._arrived_anchors, admission, self._ended))
        ints = [*(getattr(admission, name) for name in INTS), accept_lens]
        whole = [*ints, *(getattr(admission, name).float() for name in FLOATS)]
        packed = torch.cat([each.contiguous().view(torch.int32).flatten() for each in whole])
        return Readback(partial(self._arrived, admission, self._ended), packed)

    def _arrived_anchors(self, admission: Admission, ended: StepEnd) -> None:
        """Queue the outcome of a step without drafts, which the host knows: one token of each request."""
        count = len(admission.step.view.rows)
        if len(self._one_each) != count:
            self._none, self._one_each = Draft.nothing(count, self.requests.gamma, "cpu"), torch.ones(count).long()
        lens, confidence = self._none.lens, self._none.confidence
        known: dict[str, Any] = dict.fromkeys(INTS, lens) | dict.fromkeys(FLOATS, confidence) | {"ends": None}
        self._unread.append(StepDrafts(replace(admission, **known), self._one_each, ended))

    def _arrived(self, admission: Admission, ended: StepEnd, packed: torch.Tensor) -> None:
        """Queue the outcome of a step with drafts, from `finish`, packed, on the host."""
        count = 2 * (len(INTS) + 1) * len(admission.verify_lens)
        *ints, accepted = packed[:count].view(torch.int64).view(len(INTS) + 1, -1)
        floats = packed[count:].view(torch.float32).view(len(FLOATS), *admission.raw.shape)
        copies: dict[str, Any] = dict(zip((*INTS, *FLOATS), (*ints, *floats), strict=True))
        self._unread.append(StepDrafts(replace(admission, **copies), accepted, ended))

    def interrupt(self) -> None:
        """Time neither the last step on a CPU nor the next one on a GPU: requests are prefilled between them."""
        self._last = self._ended = None
        self.flush()

    def flush(self) -> None:
        self._catch_up()
        self.parts.flush()

    def _catch_up(self) -> None:
        """Read the outcomes that have arrived, and learn from finished steps."""
        while self._unread:
            outcome = self._unread.popleft()
            self._read_steps.append((outcome, self._read(outcome)))
        while self._read_steps and self._read_steps[0][0] is not self._last:
            self._learn(*self._read_steps.popleft())

    def _read(self, drafts: StepDrafts) -> FinishedStep:
        """Count and record the outcome of a step."""
        step, admission = drafts.step, drafts.admission
        drafts.read()
        survival = drafts.confidence  # 0 without drafts
        if drafts.drafted:
            survival = survival_of(admission.confidence.float(), admission.draft_lens).numpy()
        self.requests.take(step.view, drafts.tokens)
        drafts.calibration = self.calibration
        drafts.planner_seconds, self._learning = admission.planner_seconds + self._learning, 0.0
        self.parts.drafted(drafts)
        adapters = drafts.numbers("adapters")
        which = drafts.tells if adapters is None else drafts.tells & (adapters == 0)
        if which.any():
            arrays = drafts.raw, drafts.verify_lens, drafts.accept_lens - 1, drafts.classes
            blocks = [array[which] for array in arrays]
            self.recording.blocks.record(*blocks)
            run = self.optional.run
            self.calibration = run("calibration", None, self.online.observe, *blocks) or self.calibration
        return FinishedStep(
            view=step.view, survival=survival, verify_lens=drafts.verify_lens, accept_lens=drafts.accept_lens,
            draft_mask=step.draft_mask, drafting=admission.drafting,
            looked_up=None if admission.looked_up is None else looked_up(drafts.classes), depth=step.depth,
            tokens=drafts.forward_tokens, seconds=None if drafts.ended is None else drafts.ended.seconds,
            draft_seconds=admission.draft_seconds if admission.drafting or self.on_host else 0.0,
            host_seconds=(admission.draft_seconds or 0.0) + admission.planner_seconds if self.on_host else 0.0,
        )  # fmt: skip

    def _learn(self, drafts: StepDrafts, finished: FinishedStep) -> None:
        """Show the planner a step that is over, and record how long it took."""
        began = time.perf_counter()
        if self.on_host:
            finished.seconds = drafts.seconds
        seconds = finished.seconds
        drafts.step.planner.observe(finished)
        self._learning += time.perf_counter() - began
        if seconds is not None:
            view, tokens = finished.view, finished.tokens
            drafting = int(self.planner.charged_drafts(finished.drafting, len(view.rows), None))
            requests, context = len(view.rows), int(view.contexts.sum())
            self.recording.steps.append(StepTime(requests, tokens, context, drafting, seconds, finished.draft_seconds))
            predicted = drafts.step.budget.predicted_seconds(tokens - requests)
            self.optional.run("metrics", None, self.metrics.observe_time, seconds, predicted)

    def state(self) -> dict[str, Any]:
        """Return all records since `forget`, and the buckets, in types that can be sent to another process."""
        self._catch_up()
        self.metrics.flush()
        return self.recording.to_lists() | {"buckets": None if self.buckets is None else list(self.buckets.sizes)}

    def live(self) -> dict[str, Any]:
        """Return counts since the start, and the planner's view of the last step, for the page."""
        curve = self.optional.run("planning", None, self._curve)
        self.parts.flush()
        return live.snapshot(self.metrics, curve)

    def _curve(self) -> PlannedCurve | None:
        self._catch_up()
        return self.planner.curve()

    def forget(self) -> None:
        self._catch_up()
        self.recording.clear()
