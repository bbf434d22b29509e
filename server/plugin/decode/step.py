"""Records of a decode step: begun, drafted, decided. Each is created once, from the one before and new data.

The latest records are kept to measure step costs and fit calibrations.
"""

from collections import deque
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from outrider.scheduler.calibration.records import Recorder
from outrider.scheduler.calibration.table import CalibrationTable
from outrider.scheduler.contract import Budget, Planner, StepView
from outrider.scheduler.cost.prefill import PrefillPoint

from ..cuda.readback import StepEnd
from .requests import Entries

RECORDED_REQUEST_STEPS = 1 << 15
RECORDED_STEPS = 1 << 12
RECORDED_PREFILLS = 1 << 8


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step of R requests that has begun.

    view, budget: what `planner` got and gave. draft_mask: [R] bool, the drafter's model may draft for a request.
    classes: [R] int64, place in `calibration.classes.CLASSES` of a model's drafts. began: seconds on the host's clock.
    planner_seconds: the planner's time so far. bucket: tokens of its forward; None: as many as are verified.
    """

    planner: Planner
    view: StepView
    budget: Budget
    draft_mask: np.ndarray
    entries: Entries
    classes: torch.Tensor
    began: float
    planner_seconds: float
    bucket: int | None = None

    @property
    def drafts(self) -> bool:
        """True if the model may draft for any request."""
        return bool(np.count_nonzero(self.draft_mask))

    @property
    def depth(self) -> int | None:
        """Most tokens that the model drafts per request; None: all it can, or not every request is planned."""
        return self.budget.depth if self.entries.all_planned else None

    @property
    def looks_up(self) -> bool:
        """True if prompt lookup may draft for any request. For requests without planning it always may."""
        return (self.budget.look_up or not self.entries.all_planned) and bool(np.count_nonzero(self.view.limits))


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """A step after drafting: how many drafts are verified.

    classes: [R] int64, place of each draft in `calibration.classes.CLASSES`.
    ends: [R] int64, most tokens that can be committed: fewer than gamma + 1 if the draft ends the answer.
        None: the step has no drafts.
    draft_lens, verify_lens: [R] int64. raw, confidence: [R, gamma] from the drafter, and calibrated.
    drafting: requests for which the model drafted. looked_up: [R] bool, drafts of prompt lookup; None: there is none.
    draft_seconds: time of drafting; None on a GPU, as the host does not wait for it.
    planner_seconds: the planner's time so far.
    """

    step: Step
    classes: torch.Tensor
    ends: torch.Tensor | None
    draft_lens: torch.Tensor
    raw: torch.Tensor
    confidence: torch.Tensor
    verify_lens: torch.Tensor
    drafting: int
    looked_up: torch.Tensor | None
    draft_seconds: float | None
    planner_seconds: float


@dataclass(slots=True, eq=False)
class StepDrafts:
    """A step after acceptance: its drafts and their outcome.

    admission: in tensors of the host. accepted: [R] int64 in 1..gamma+1, accepted drafts plus the target's token.
    ended: end of the step on a GPU. seconds: time until the next decode step on a CPU; None if not known (yet).

    `read` makes arrays of admission and accepted. tokens: [R], committed, fewer than accept_lens if an answer ends.
    tells: [R] bool, requests with verified drafts and without rules, whose outcomes serve calibration. calibration: of
    the step's drafts. planner_seconds: the planner's time, with learning since the step before.
    """

    admission: Admission
    accepted: torch.Tensor
    ended: StepEnd | None = None
    seconds: float | None = None
    raw: np.ndarray = field(init=False)
    confidence: np.ndarray = field(init=False)
    classes: np.ndarray = field(init=False)
    draft_lens: np.ndarray = field(init=False)
    verify_lens: np.ndarray = field(init=False)
    accept_lens: np.ndarray = field(init=False)
    tokens: np.ndarray = field(init=False)
    tells: np.ndarray = field(init=False)
    calibration: CalibrationTable | None = None
    planner_seconds: float = 0.0

    def read(self) -> None:
        admission = self.admission
        self.raw, self.confidence = admission.raw.float().numpy(), admission.confidence.float().numpy()
        self.classes, self.draft_lens = admission.classes.numpy(), admission.draft_lens.numpy()
        self.verify_lens, self.accept_lens = admission.verify_lens.numpy(), self.accepted.numpy()
        self.tokens, self.tells = self.accept_lens, self.verify_lens > 0
        if admission.ends is not None:
            self.tokens = np.minimum(self.accept_lens, admission.ends.numpy())
        if self.step.view.ruled is not None:
            self.tells &= ~self.step.view.ruled

    @property
    def step(self) -> Step:
        return self.admission.step

    @property
    def drafted(self) -> bool:
        return self.admission.ends is not None

    @property
    def forward_tokens(self) -> int:
        """Tokens of the forward: verified over all requests, anchors included, or the step's bucket."""
        if self.step.bucket is not None:
            return self.step.bucket
        return len(self.verify_lens) + int(self.verify_lens.sum())

    def numbers(self, column: str) -> np.ndarray | None:
        """Return the requests' numbers [R] in a column of their table; None: all are 0."""
        return self.step.entries.numbers.get(column)

    def outcome(self, which: Any) -> tuple[np.ndarray, ...]:
        """Return the arrays of `DrafterWatch.observe`, of these requests."""
        arrays = self.confidence, self.classes, self.draft_lens, self.verify_lens, self.accept_lens
        return tuple(array[which] for array in arrays)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Size and time of a step that is over.

    tokens: of the forward, see `StepDrafts.forward_tokens`. context: cached tokens, summed over the requests.
    drafting: requests for which the drafter's model drafted; on a GPU, the requests that its graph holds.
    seconds: of the step, drafting included, see `cuda/readback.py`. draft_seconds: spent drafting; None: not known.
    """

    requests: int
    tokens: int
    context: int
    drafting: int
    seconds: float
    draft_seconds: float | None


class Recording:
    """blocks: outcomes of drafted blocks with at least one verified token. steps: sizes and times of steps. prefills:
    chunks of one prompt."""

    def __init__(self, gamma: int):
        self.blocks = Recorder(RECORDED_REQUEST_STEPS, gamma)
        self.steps: deque[StepTime] = deque(maxlen=RECORDED_STEPS)
        self.prefills: deque[PrefillPoint] = deque(maxlen=RECORDED_PREFILLS)

    def clear(self) -> None:
        self.blocks.clear()
        self.steps.clear()
        self.prefills.clear()

    def to_lists(self) -> dict[str, Any]:
        """Return the records as one list per field, for another process."""
        blocks = self.blocks.records()
        return {
            "steps": {each.name: [getattr(step, each.name) for step in self.steps] for each in fields(StepTime)},
            "prefills": [point.to_json() for point in self.prefills],
            "records": {
                "confidence": blocks.confidence.tolist(),
                "verify_lens": blocks.verify_lens.tolist(),
                "accepted": blocks.accepted.tolist(),
                "classes": blocks.classes.tolist(),
            },
        }
