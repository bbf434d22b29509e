"""What the worker remembers of each running request, in arrays indexed by its row of SGLang's request pool."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import torch


class RequestTable:
    """enabled: [rows] bool, whether the request speculates. seeds: [rows] int64, of its random numbers."""

    def __init__(self, rows: int, device: Any):
        self.enabled = torch.ones(rows, dtype=torch.bool, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)

    def admit(self, reqs: Sequence[Any], rows: torch.Tensor) -> None:
        """Read the settings of requests that are being prefilled (again, after a retraction)."""
        seeds = [_seed(req) for req in reqs]
        enabled = [_speculates(req) for req in reqs]
        self.seeds[rows.long()] = torch.tensor(seeds, dtype=torch.int64, device=self.seeds.device)
        self.enabled[rows.long()] = torch.tensor(enabled, dtype=torch.bool, device=self.enabled.device)


def _seed(req: Any) -> int:
    """The request's own seed, or a random one that stays with it (chunks and retractions prefill it again)."""
    if req.sampling_params.sampling_seed is None:
        req.sampling_params.sampling_seed = secrets.randbits(62)
    return int(req.sampling_params.sampling_seed)


def _speculates(req: Any) -> bool:
    params = req.sampling_params.custom_params or {}
    return bool((params.get("speculation") or {}).get("enabled", True))
