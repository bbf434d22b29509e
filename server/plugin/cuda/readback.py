"""Copies and times that a device finishes later; neither the host nor the next step waits for them.

On a GPU the host is a step ahead of the device. A step lasts from the end of the previous step to its own end, on the
device's clock. On a CPU it lasts until the next one begins.
"""

from __future__ import annotations

from typing import Any

import torch


class PendingCopy:
    """Copies on the host that are there once `done`: pinned, in the order of the tensors. sources: kept until then, so
    that their memory is not reused."""

    def __init__(self, copies: tuple[torch.Tensor, ...], sources: tuple[torch.Tensor, ...], event: Any) -> None:
        self.copies, self.sources, self.event = copies, sources, event

    @property
    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class StepEnd(PendingCopy):
    """The moment at which a device has finished all work launched so far. before: end of the previous step; None if
    other work came between."""

    def __init__(self, device: torch.device, before: StepEnd | None) -> None:
        super().__init__((), (), torch.get_device_module(device).Event(enable_timing=True))
        self.event.record()
        self._before = None if before is None else before.event

    @property
    def seconds(self) -> float | None:
        """Seconds from the end of the step before to this one, once this one has come; None if unknown."""
        return None if self._before is None else float(self._before.elapsed_time(self.event)) / 1e3


class Readback:
    """A separate stream for copies, which wait until their sources are computed."""

    def __init__(self) -> None:
        self._stream: Any = None

    def start(self, *tensors: torch.Tensor) -> PendingCopy:
        """Copy the tensors as they are once all work launched so far is done."""
        device = tensors[0].device
        module = torch.get_device_module(device)
        if self._stream is None:
            self._stream = module.Stream()
        computed, copied = module.Event(), module.Event()
        computed.record()
        with module.stream(self._stream):
            self._stream.wait_event(computed)
            pin = device.type != "cpu"  # tests on a CPU need no pinned memory
            copies = tuple(
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin).copy_(tensor, non_blocking=True)
                for tensor in tensors
            )
            copied.record()
        return PendingCopy(copies, tensors, copied)
