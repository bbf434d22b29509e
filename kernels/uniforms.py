"""Counter-based uniform random numbers: a request's seed decides its randomness, whatever else is in the batch.

Every number is a hash of (seed, position, index, purpose). A decode step of a request has a position of its own
(that of its anchor), so no number is ever used twice and every step's draws are independent of all earlier ones.
The hash is SplitMix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014),
which int64 arithmetic with wrap-around computes on any device.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from outrider.kernels.cpu import native

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a number is drawn for; different purposes are independent streams."""

    DRAFT = 1
    ACCEPT = 2
    FINAL = 3


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, count: int, purpose: Purpose) -> torch.Tensor:
    """[R, count] float32 in [0, 1) for seeds [R] int64 at positions [R] int64."""
    if seeds.is_cpu and native.available():
        return torch.ops.outrider.uniforms(seeds.long(), positions.long(), count, int(purpose))
    return torch_uniforms(seeds, positions, count, purpose)


def torch_uniforms(seeds: torch.Tensor, positions: torch.Tensor, count: int, purpose: Purpose) -> torch.Tensor:
    """`uniforms` without compiled kernels, on any device."""
    index = torch.arange(count, device=seeds.device, dtype=torch.int64)
    stream = torch.tensor(int(purpose), device=seeds.device, dtype=torch.int64)
    state = _mix(seeds.long() + _GOLDEN * stream)
    state = _mix(state + _GOLDEN * positions.long())
    state = _mix(state[:, None] + _GOLDEN * (index + 1))
    return (_shift(state, 40)).to(torch.float32) * 2.0**-24


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
