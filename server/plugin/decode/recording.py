"""The last steps of the worker, for whoever measures: what step costs and calibrations are made of."""

from __future__ import annotations

from collections import deque
from dataclasses import fields
from typing import Any

from outrider.scheduler.calibration.records import Recorder

from .step import StepTime

RECORDED_REQUEST_STEPS = 1 << 15
RECORDED_STEPS = 1 << 12


class Recording:
    """blocks: what became of drafted blocks of which anything was verified. steps: what steps held and took."""

    def __init__(self, gamma: int):
        self.blocks = Recorder(RECORDED_REQUEST_STEPS, gamma)
        self.steps: deque[StepTime] = deque(maxlen=RECORDED_STEPS)

    def clear(self) -> None:
        self.blocks.clear()
        self.steps.clear()

    def to_lists(self) -> dict[str, Any]:
        """The records as one list per field, for another process."""
        blocks = self.blocks.records()
        return {
            "steps": {field.name: [getattr(step, field.name) for step in self.steps] for field in fields(StepTime)},
            "records": {
                "confidence": blocks.confidence.tolist(),
                "verify_lens": blocks.verify_lens.tolist(),
                "accepted": blocks.accepted.tolist(),
                "classes": blocks.classes.tolist(),
            },
        }
