"""The boundary around the optional parts of a step: speculation may fail, serving may not.

Parts that draft, plan, look up, calibrate, learn, trace or count are called through `Boundary.run`. It counts and logs
an exception, and the step goes on without the result. A part that fails often is off until the next restart. The
target's forward, logit rules, sampling, acceptance, commits and broadcasts to other ranks are called directly.

Texts stay exact: if drafting or planning fails, the step verifies no drafts. If the failure depended on a drafted
token, so did the admission of that step; the part is off from then on. An error of a device ends the engine, because
every later call to the device fails as well.
"""

import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from prometheus_client import Counter

logger = logging.getLogger(__name__)

Args = ParamSpec("Args")
Result = TypeVar("Result")
Other = TypeVar("Other")

PARTS = {
    "drafting": 1,
    "planning": 1,
    "calibration": 1,
    "tracing": 1,
    "lookups": 3,
    "own_drafters": 3,
    "adapters": 3,
    "learning": 3,
    "prompts": 3,
    "grammars": 3,
    "metrics": 3,
    "questions": 0,
}
"""Failures after which each part is off; 0: it stays on. One failed draft or plan may leave half-written state. The
other parts work by request, and a single request may be the cause. Questions come from the HTTP process."""


class Boundary:
    """Calls optional parts and survives their exceptions.

    failures: counter by part; None raises exceptions, for tests of single modules. device: device of the parts.
    """

    def __init__(self, failures: Counter | None = None, device: Any = "cpu"):
        self._by_part = None if failures is None else {part: failures.labels(part) for part in PARTS}
        self._device = torch.device(device)
        self.off: set[str] = set()
        self.counts = dict.fromkeys(PARTS, 0)

    def run(
        self, part: str, otherwise: Other, call: Callable[Args, Result], /, *args: Args.args, **options: Args.kwargs
    ) -> Result | Other:
        """Return the result of a call; `otherwise` if it fails or the part is off."""
        if part in self.off:
            return otherwise
        try:
            return call(*args, **options)
        except Exception as error:
            self._survive(part, error)
            return otherwise

    def _survive(self, part: str, error: Exception) -> None:
        """Count and log a failure. Raises errors of the device."""
        if self._by_part is None:
            raise error
        if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError):
            logger.error("%s failed on the device, which cannot be survived: %s", part, _cause(error))
            raise error
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize()  # raises an error that the device has not reported yet
        self.counts[part] += 1
        self._by_part[part].inc()
        most = PARTS[part]
        if self.counts[part] > max(most, 1):  # a part that stays on is logged once
            return
        if self.counts[part] == most:
            self.off.add(part)
        what = "is off until the next restart" if part in self.off else "is left out this time"
        logger.error("%s failed and %s, answers stay exact: %s", part, what, _cause(error))


def _cause(error: Exception) -> str:
    """Return one line: the exception, its message, and where it was raised."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).splitlines()[:1])
    return f"{type(error).__name__}: {message} ({Path(at.filename).name}:{at.lineno})"
