"""Broadcasts from the first tensor-parallel rank of an engine, which makes all decisions, to the other ranks.

All ranks must run and keep the same tokens, but clocks, seeds and the rounding of probabilities differ between them. A
step has two broadcasts between devices: the tokens to verify and the results. If the size of the token bucket is
decided before the lengths, hosts exchange it: every rank replays the same graph, and no host waits for its device.
"""

import math
from typing import Any

import torch
import torch.distributed


class Ranks:
    """The ranks of an engine.

    group: their SGLang GroupCoordinator. device: device of broadcast tensors.
    """

    def __init__(self, group: Any, device: Any) -> None:
        self.group = group
        self.device = device

    def broadcast(self, *parts: torch.Tensor) -> None:
        """Send parts [...] int64 from the first rank; no-op with a single rank."""
        if self.group.world_size > 1:
            self.group.broadcast(torch.cat([part.reshape(-1).long() for part in parts]))

    def receive(self, *shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """Receive the parts of `broadcast`, of these shapes, on any other rank."""
        sizes = [math.prod(shape) for shape in shapes]
        received = torch.empty(sum(sizes), dtype=torch.int64, device=self.device)
        self.group.broadcast(received)
        return tuple(part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True))

    def broadcast_bucket(self, bucket: int | None) -> None:
        """Send the number of tokens of the step's forward from the first rank; None: steps have no buckets."""
        if self.group.world_size > 1 and bucket is not None:
            self._between_hosts(torch.tensor(bucket))

    def receive_bucket(self) -> int:
        """Receive the number of `broadcast_bucket` on any other rank."""
        return int(self._between_hosts(torch.tensor(0)))

    @property
    def decides(self) -> bool:
        """True on the first rank."""
        return bool(self.group.rank_in_group == 0)

    def agree(self, numbers: tuple[int, int]) -> tuple[int, int]:
        """Return the first rank's numbers on every rank."""
        if self.group.world_size == 1:
            return numbers
        first, second = self._between_hosts(torch.tensor(numbers)).tolist()
        return first, second

    def _between_hosts(self, numbers: torch.Tensor) -> torch.Tensor:
        torch.distributed.broadcast(numbers, self.group.first_rank, group=self.group.cpu_group)
        return numbers
