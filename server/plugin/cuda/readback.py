"""Outcomes and times of steps, which a device finishes later; neither the host nor the next step waits for them.

On a GPU the host is a step ahead of the device. A step lasts from the end of the previous step to its own end, on the
device's clock. On a CPU it lasts until the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch


class StepEnd:
    """The moment at which a device has finished all work launched so far. before: end of the previous step; None if
    other work came between."""

    def __init__(self, device: torch.device, before: StepEnd | None) -> None:
        self._event = torch.get_device_module(device).Event(enable_timing=True)
        self._event.record()
        self._before = None if before is None else before._event

    @property
    def seconds(self) -> float | None:
        """Seconds from the end of the step before to this one, once this one has come; None if unknown."""
        return None if self._before is None else float(self._before.elapsed_time(self._event)) / 1e3


class Readback:
    """An auxiliary output of SGLang: `arrived` gets copies of the tensors on the host, after the step's tokens."""

    def __init__(self, arrived: Callable[..., None], *tensors: torch.Tensor) -> None:
        self._arrived, self.tensors = arrived, tensors

    def copy_to_host(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Start the copies, without a wait, on SGLang's stream for them."""
        self.tensors = tuple(copy(tensor) for tensor in self.tensors)
        return self

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Pass the copies on. SGLang calls this when the step is over."""
        self._arrived(*self.tensors)
