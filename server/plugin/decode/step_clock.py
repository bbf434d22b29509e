"""Times of decode steps.

A CPU's step lasts until the next one begins. On a GPU the host is a step ahead: between two of its steps the device
ends the one before. There a step lasts from the end of the one before it to its own, on the device's clock: the longer
of the host's work and the device's, whichever kept the other waiting.
"""

from __future__ import annotations

import torch


class StepEnd:
    """The moment at which a device has finished all work launched so far.

    before: end of the previous step; None if other work came between.
    """

    def __init__(self, device: torch.device, before: StepEnd | None) -> None:
        self._event = torch.get_device_module(device).Event(enable_timing=True)
        self._event.record()
        self._before = None if before is None else before._event

    @property
    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    @property
    def seconds(self) -> float | None:
        """Seconds from the end of the step before to this one, once this one has come; None if unknown."""
        if self._before is None:
            return None
        return float(self._before.elapsed_time(self._event)) / 1e3
