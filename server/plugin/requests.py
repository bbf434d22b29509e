"""What the worker remembers of each running request, in arrays indexed by its row of SGLang's request pool."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import torch


class RequestTable:
    """limits: [rows] int64, drafted tokens per step, at most; 0 without speculation.
    seeds: [rows] int64, of the request's random numbers.
    """

    def __init__(self, rows: int, gamma: int, device: Any):
        self.gamma = gamma
        self.limits = torch.full((rows,), gamma, dtype=torch.int64, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)

    def admit(self, reqs: Sequence[Any], rows: torch.Tensor) -> None:
        """Read the settings of requests that are being prefilled (again, after a retraction)."""
        seeds = [_seed(req) for req in reqs]
        limits = [_limit(req, self.gamma) for req in reqs]
        self.seeds[rows.long()] = torch.tensor(seeds, dtype=torch.int64, device=self.seeds.device)
        self.limits[rows.long()] = torch.tensor(limits, dtype=torch.int64, device=self.limits.device)


def _seed(req: Any) -> int:
    """The request's own seed, or a random one that stays with it (chunks and retractions prefill it again)."""
    if req.sampling_params.sampling_seed is None:
        req.sampling_params.sampling_seed = secrets.randbits(62)
    return int(req.sampling_params.sampling_seed)


def _limit(req: Any, gamma: int) -> int:
    """How many tokens may be drafted per step for this request, from the `speculation` field of its API call."""
    options = (req.sampling_params.custom_params or {}).get("speculation") or {}
    if not options.get("enabled", True):
        return 0
    return min(gamma, int(options.get("gamma") or gamma))
