"""Runs the planner in a decode step: requests its budget, reports outcomes to it, and records them.

Outcomes are read in batches, before the planner learns or metrics are written: a forward evicts this code from the
caches, so reading three outcomes costs about as much as reading one. On a GPU they are copied to the host after the
step's work and read once they have arrived, except for the last step's. The planner never waits for the device, nor the
device for the planner.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
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

from . import live
from .adapters import BASE, AdapterOutcomes
from .boundary import Boundary
from .learning import DrafterWatch
from .metrics import SpeculationMetrics
from .owner_drafters import OwnerDrafters
from .readback import PendingCopy, Readback
from .requests import Entries, RequestTable
from .step import Admission, Outcome, Recording, Step, StepTime
from .step_clock import StepEnd

MOST_UNREAD = 16
"""Most steps with unread outcomes."""
DEVICE_LAG = 1
"""Steps that are still under way on a GPU when the next one is prepared; their results are not read yet."""


class StepPlanner:
    """Runs the planner around each decode step: requests a budget before it, reports outcomes after it.

    planner: decides for requests that leave the decision to it. calibration: of the drafter's confidences; None takes
    them as they are.
    device: where the steps' tensors live. buckets: sizes of which a step has one; None: any. block, draft_sizes: as in
        `Planner`.
    corrects: outcomes correct the calibration while serving (`Drafter.assesses_itself`).
    watch: receives outcomes of drafts on a server that learns. by_owner: receives them if keys or adapters have their
        own drafters, and holds their calibrations. adapters: the same for LoRA adapters.
    optional: calls parts that may fail while planning continues.
    """

    def __init__(
        self,
        planner: Planner,
        calibration: CalibrationTable | None,
        requests: RequestTable,
        metrics: SpeculationMetrics,
        device: Any,
        buckets: TokenBuckets | None = None,
        block: int | None = None,
        draft_sizes: Sequence[int] = (),
        watch: DrafterWatch | None = None,
        by_owner: OwnerDrafters | None = None,
        adapters: AdapterOutcomes | None = None,
        corrects: bool = False,
        optional: Boundary | None = None,
    ):
        self.buckets, self.block, self.draft_sizes = buckets, block, draft_sizes
        self.requests = requests
        self.metrics = metrics
        self.optional = optional or Boundary()
        self.on_host = torch.device(device).type == "cpu"
        self.lag = 0 if self.on_host else DEVICE_LAG
        self.readback = Readback()
        self.recording = Recording(requests.gamma)
        self.watch, self.by_owner, self.adapters = watch, by_owner, adapters
        self.corrects = corrects and by_owner is None  # owners' drafters have calibrations of their own
        self._take(planner, calibration)
        self._last: Outcome | None = None  # the step that lasts until the next one begins; None: it cannot be timed
        # On a GPU: the end of the last step, and of the one before the current step; None: other work came between.
        self._ended: StepEnd | None = None
        self._before: StepEnd | None = None
        self._unread: deque[Outcome] = deque()
        self._read_steps: deque[tuple[Outcome, FinishedStep]] = deque()  # may not be over yet
        # Of a step without drafts, on a GPU's host: no drafts, and a token of each request.
        self._none, self._one_each = Draft.nothing(0, requests.gamma, "cpu"), torch.ones(0).long()
        self._learning = 0.0  # seconds of the planner's, counted with the step that is read next

    def plan_by(self, planner: Planner, calibration: CalibrationTable | None) -> None:
        """Plan by these from the next step on. Outcomes of earlier steps go to the planner that planned them."""
        self._last = self._ended = None
        self._catch_up(0)
        self._take(planner, calibration)

    def _take(self, planner: Planner, calibration: CalibrationTable | None) -> None:
        planner.buckets, planner.block, planner.draft_sizes = self.buckets, self.block, self.draft_sizes
        self.planner, self.calibration = planner, calibration
        self.online = OnlineCalibration(self.requests.gamma, calibration) if self.corrects else None

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
            self._catch_up(self.lag)
        view = self._view(entries, contexts, unsure)
        if self.planner.looks_back(view) or len(self._unread) > MOST_UNREAD:
            self._catch_up(self.lag)
        called = time.perf_counter()
        budget = self.planner.budget(view)
        draft_mask = budget.draft_mask(view.limits)
        if not entries.all_planned:
            draft_mask = np.where(entries.planned, draft_mask, view.limits > 0)
        return Step(
            view=view,
            budget=budget,
            draft_mask=draft_mask,
            entries=entries,
            classes=classes,
            began=now,
            planner_seconds=time.perf_counter() - called,
            bucket=None if self.buckets is None else self._bucket(self.buckets, view, entries, budget),
        )

    def _view(self, entries: Entries, contexts: np.ndarray, unsure: int) -> StepView:
        return self.requests.view(entries, contexts, unsure)

    def _bucket(self, buckets: TokenBuckets, view: StepView, entries: Entries, budget: Budget) -> int:
        """Return the smallest bucket that holds any possible admission."""
        if budget.tokens is None:
            raise ValueError(
                f"{type(self.planner).__name__} sets no bound, and a step has a size that is decided before"
            )
        planned = int(view.limits[entries.planned].sum())
        others = int(view.limits.sum()) - planned
        return buckets.round_up(len(view.rows) + min(budget.tokens, planned) + others)

    def least_bucket(self, requests: int) -> int | None:
        """Tokens of a step that verifies anchors alone; None: as many as requests."""
        return None if self.buckets is None else self.buckets.round_up(requests)

    def admit(self, step: Step, draft: Draft, draft_seconds: float | None) -> Admission:
        """Decide how many draft tokens of each request are verified. draft_seconds: as in `Admission`."""
        began = time.perf_counter()
        classes, ends, draft_lens, confidence = step.classes, None, draft.lens, draft.confidence
        verify_lens = draft.lens  # without drafts
        if step.drafts or draft.looked_up is not None:
            if draft.looked_up is not None:
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
            verify_lens = self._verify_lens(step, confidence, draft_lens)
        return Admission(
            step=step,
            classes=classes,
            ends=ends,
            draft_lens=draft_lens,
            raw=draft.confidence,
            confidence=confidence,
            verify_lens=verify_lens,
            drafting=draft.drafting,
            looked_up=draft.looked_up,
            draft_seconds=draft_seconds,
            planner_seconds=step.planner_seconds + time.perf_counter() - began,
        )

    def _parameters(
        self, confidence: torch.Tensor, classes: torch.Tensor, entries: Entries
    ) -> tuple[torch.Tensor, Parameters | None]:
        """Parameters of the calibrations, for confidence [R, gamma], and the place [R] in them of each request, of
        these classes [R]."""
        apart = self.by_owner is not None or entries.adapters is not None
        if self.calibration is None and not apart:
            return classes, None
        common = self.calibration or CalibrationTable.of({}, confidence.shape[1])
        if not apart:
            return classes, common.parameters(confidence.shape[1], confidence.device)
        return parameters_of_each(self._tables(entries, common), confidence, classes)

    def _tables(self, entries: Entries, common: CalibrationTable) -> list[CalibrationTable]:
        """Each request's calibration: of its adapter, else of its owner's drafter, else `common`."""
        tables = [common] * len(entries.rows)
        for owner, numbers in ((self.by_owner, entries.sets), (self.adapters, entries.adapters)):
            if owner is not None and numbers is not None:
                tables = [owner.table(number) or table for number, table in zip(numbers.tolist(), tables, strict=True)]
        return tables

    def _verify_lens(self, step: Step, confidence: torch.Tensor, draft_lens: torch.Tensor) -> torch.Tensor:
        """Return [R] int64: the planner's admission, and all drafts of requests that it does not decide for."""
        if step.entries.all_planned:
            return self.planner.admit(confidence, draft_lens, step.budget)
        planned = upload(step.entries.planned, draft_lens.device)
        return torch.where(planned, self.planner.admit(confidence, draft_lens * planned, step.budget), draft_lens)

    def finish(self, admission: Admission, accept_lens: torch.Tensor) -> None:
        """A step's tokens are decided: accept_lens [R], the bonus token included."""
        if self.on_host:
            outcome = self._last = Outcome(admission, accept_lens)
        else:
            self._ended = StepEnd(accept_lens.device, self._before)
            outcome = self._of_anchors(admission) if admission.ends is None else self._read_back(admission, accept_lens)
            outcome.ended = self._ended
        self._unread.append(outcome)

    def _of_anchors(self, admission: Admission) -> Outcome:
        """The outcome of a step without drafts, which the host knows: one token of each request."""
        count = len(admission.step.view.rows)
        if len(self._one_each) != count:
            self._none, self._one_each = Draft.nothing(count, self.requests.gamma, "cpu"), torch.ones(count).long()
        lens, confidence = self._none.lens, self._none.confidence
        known = replace(
            admission, classes=lens, draft_lens=lens, verify_lens=lens, raw=confidence, confidence=confidence
        )
        return Outcome(known, self._one_each)

    def _read_back(self, admission: Admission, accept_lens: torch.Tensor) -> Outcome:
        """Start copying the outcome to the host; its tensors are read after `arrival`."""
        ends = admission.ends
        assert ends is not None
        ints = [admission.verify_lens, admission.draft_lens, ends, admission.classes, accept_lens]
        floats = torch.stack([admission.raw.float(), admission.confidence.float()])
        arrival = self.readback.start(torch.stack(ints), floats)
        (verify_lens, draft_lens, ends, classes, accepted), (raw, confidence) = arrival.copies
        return Outcome(
            replace(
                admission,
                classes=classes,
                ends=ends,
                draft_lens=draft_lens,
                raw=raw,
                confidence=confidence,
                verify_lens=verify_lens,
            ),
            accepted,
            arrival,
        )

    def interrupt(self) -> None:
        """Requests are prefilled next: the last step of a CPU, and the next one of a GPU, cannot be timed."""
        self._last = self._ended = None
        self.flush()

    def flush(self) -> None:
        """Bring the metrics up to date."""
        self._catch_up(self.lag)
        self.optional.run("metrics", None, self.metrics.flush)
        if self.adapters is not None:
            self.optional.run("adapters", None, self.adapters.flush)

    def _catch_up(self, lag: int) -> None:
        """Read the outcomes of all finished steps but the last `lag`, and learn from steps that are over.

        On a device, read only outcomes that have arrived, unless all are requested.
        """
        while len(self._unread) > lag:
            first = self._unread[0]
            if (pending := first.arrival or first.ended) is not None and not _is_there(pending, wait=not lag):
                break
            outcome = self._unread.popleft()
            self._read_steps.append((outcome, self._read(outcome)))
        while self._read_steps and self._read_steps[0][0] is not self._last:
            self._learn(*self._read_steps.popleft())

    def _read(self, outcome: Outcome) -> FinishedStep:
        """Count and record the outcome of a step."""
        step, admission, run = outcome.step, outcome.admission, self.optional.run
        verify_lens, accept_lens = admission.verify_lens.numpy(), outcome.accept_lens.numpy()
        confidence, draft_lens = admission.confidence.float(), admission.draft_lens
        classes = admission.classes.numpy()
        found = None if admission.looked_up is None else looked_up(classes)
        drafted = admission.ends is not None
        tokens = accept_lens if admission.ends is None else np.minimum(accept_lens, admission.ends.numpy())
        # Not read without drafts: the confidences, all 0, take its place.
        survival = survival_of(confidence, draft_lens).numpy() if drafted else confidence.numpy()
        self.requests.take(step.view, tokens)
        tried = verify_lens > 0
        if step.entries.ruled is not None:  # their own rules change acceptance: not for calibration
            tried &= ~step.entries.ruled
        raw, adapters = admission.raw.float().numpy(), step.entries.adapters
        if self.adapters is not None and adapters is not None:
            drafts = (raw, classes, draft_lens.numpy(), verify_lens, accept_lens)
            run("adapters", None, self.adapters.observe, adapters, *drafts, tells=tried, otherwise=self.calibration)
            tried &= adapters == BASE
        if tried.any():
            blocks = raw[tried], verify_lens[tried], accept_lens[tried] - 1, classes[tried]
            self.recording.blocks.record(*blocks)
            if self.online is not None:
                self.calibration = run("calibration", None, self.online.observe, *blocks) or self.calibration
        counted = (confidence.numpy(), classes, draft_lens.numpy(), verify_lens, accept_lens, tokens)
        run("metrics", None, self.metrics.observe_step, step, *counted)
        if drafted and self.watch is not None:
            base = slice(None) if adapters is None else adapters == BASE
            run("learning", None, self.watch.observe, *(part[base] for part in counted[:-1]))
        if drafted and self.by_owner is not None:
            run("own_drafters", None, self.by_owner.observe, step.entries.sets, *counted[:-1])
        drafting, draft_seconds = admission.drafting, admission.draft_seconds
        planner_seconds = admission.planner_seconds + self._learning
        run("metrics", None, self.metrics.observe_draft_and_planner, draft_seconds or 0.0, planner_seconds)
        self._learning = 0.0
        return FinishedStep(
            view=step.view,
            survival=survival,
            verify_lens=verify_lens,
            accept_lens=accept_lens,
            draft_mask=step.draft_mask,
            drafting=drafting,
            looked_up=found,
            depth=step.depth,
            tokens=outcome.tokens,
            seconds=None if outcome.ended is None else outcome.ended.seconds,
            draft_seconds=draft_seconds if drafting or self.on_host else 0.0,
            host_seconds=(draft_seconds or 0.0) + admission.planner_seconds if self.on_host else 0.0,
        )

    def _learn(self, outcome: Outcome, finished: FinishedStep) -> None:
        """Show the planner a step that is over, and record how long it took."""
        began = time.perf_counter()
        if self.on_host:
            finished.seconds = outcome.seconds
        seconds = finished.seconds
        self.planner.observe(finished)
        self._learning += time.perf_counter() - began
        if seconds is not None:
            view, tokens = finished.view, finished.tokens
            drafting = int(self.planner.charged_drafts(finished.drafting, len(view.rows), None))
            requests, context = len(view.rows), int(view.contexts.sum())
            self.recording.steps.append(StepTime(requests, tokens, context, drafting, seconds, finished.draft_seconds))
            predicted = outcome.step.budget.predicted_seconds(tokens - requests)
            self.optional.run("metrics", None, self.metrics.observe_time, seconds, predicted)

    def state(self) -> dict[str, Any]:
        """Everything recorded since `forget`, and the buckets, in types that can be sent to another process."""
        self._catch_up(0)
        self.metrics.flush()
        return self.recording.to_lists() | {"buckets": None if self.buckets is None else list(self.buckets.sizes)}

    def live(self) -> dict[str, Any]:
        """Counts since the start, and the planner's view of the last step, for the page."""
        curve = self.optional.run("planning", None, self._curve)
        self.optional.run("metrics", None, self.metrics.flush)
        return live.snapshot(self.metrics, curve)

    def _curve(self) -> PlannedCurve | None:
        self._catch_up(0)
        return self.planner.curve()

    def forget(self) -> None:
        """Drop all records."""
        self._catch_up(0)
        self.recording.clear()


def _is_there(pending: PendingCopy | StepEnd, *, wait: bool) -> bool:
    if wait:
        pending.wait()
    return wait or pending.done
