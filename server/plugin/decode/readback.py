"""Asynchronous copies from a device to the host: neither the host nor the next step waits for them."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, eq=False)
class PendingCopy:
    """Copies on the host that are there once `done`.

    copies: pinned, in the order of the tensors. sources: kept until then, so that their memory is not reused.
    """

    copies: tuple[torch.Tensor, ...]
    sources: tuple[torch.Tensor, ...]
    event: Any

    @property
    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


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
