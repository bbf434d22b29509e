"""Asynchronous copies from a device to the host: neither the host nor the next step waits for them."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, eq=False)
class PendingCopy:
    """Copies on the host that are there once `done`.

    copies: pinned, of the tensors in their order. sources: kept until then, so that their memory is not given out.
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
    """A stream of its own, on which copies wait for what they copy."""

    def __init__(self) -> None:
        self._stream: Any = None

    def start(self, *tensors: torch.Tensor) -> PendingCopy:
        """Copy them as they will be when all that was launched so far is done."""
        device = tensors[0].device
        module = torch.get_device_module(device)
        if self._stream is None:
            self._stream = module.Stream()
        computed, copied = module.Event(), module.Event()
        computed.record()
        with module.stream(self._stream):
            self._stream.wait_event(computed)
            pin = device.type != "cpu"  # on a CPU, in tests, there is nothing to pin for
            copies = tuple(
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin).copy_(tensor, non_blocking=True)
                for tensor in tensors
            )
            copied.record()
        return PendingCopy(copies, tensors, copied)
