"""Counter-based random numbers, and tokens drawn with them: a key alone decides the draw, in any batch.

A key names a stream of numbers. Number i is a hash of key and i, SplitMix64's finaliser (Steele, Lea, Flood: Fast
splittable pseudorandom number generators, 2014), which int64 arithmetic with wrap-around computes on any device.

A token is drawn by the Gumbel-max trick: the argmax of log p(y) + G(key, y) is distributed as p where G is Gumbel
noise. Draws from two distributions with one key agree with a chance of at least (1 - TV) / (1 + TV), neither knowing
the other (Daliri, Musco, Suresh: Coupling without communication and drafter-invariant speculative decoding, 2024). The
code uses E = e^-G = -log U in place of G, and the smallest E / p wins. E is computed by float64 operations that round
alike everywhere, so its bits are the same on every device and processor.
"""

from enum import IntEnum

import torch

from .cpu import native
from .cuda import native as cuda

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_SQRT_HALF, _LOG_2 = 0.7071067811865476, 0.6931471805599453


class Purpose(IntEnum):
    """Purposes of random numbers; different purposes are independent streams."""

    DRAFT = 1
    ACCEPT = 2
    FINAL = 3
    TOKEN = 4
    CHOICE = 5
    UNMASK = 6


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index` of a request: its own for the first, then independent ones; 64 bits, signed."""
    if index == 0:
        return seed
    return int(torch_streams(torch.tensor(seed), torch.tensor(index), Purpose.CHOICE))


def streams(seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """Return int64 keys for int64 seeds at positions, all of one shape."""
    if _compiled(seeds):
        return torch.ops.outrider.streams(seeds.contiguous(), positions.contiguous(), int(purpose))
    if cuda.fits(seeds):
        return cuda.noise.streams(seeds, positions, int(purpose))
    return torch_streams(seeds, positions, purpose)


def torch_streams(seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """Do `streams` without compiled kernels, on any device."""
    stream = (_GOLDEN * int(purpose) + 2**63) % 2**64 - 2**63  # as int64 wraps around
    return _mix(_mix(seeds + stream) + _GOLDEN * positions)


def substreams(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return [N, count] int64 keys, independent of each other, from keys [N]."""
    if cuda.fits(keys):
        return cuda.noise.numbers(keys, count, torch.int64)
    return torch.ops.outrider.substreams(keys, count) if _compiled(keys) else torch_numbers(keys, count)


def draft_keys(seeds: torch.Tensor, seeded: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """Return keys [R, count] of the noise for drafts after anchors at positions [R]. Requests that are `seeded` [R]
    bool get the target's keys of their seed [R] at each token's position; all other requests get independent keys."""
    if cuda.fits(seeds):
        purposes = int(Purpose.TOKEN), int(Purpose.DRAFT)
        return cuda.noise.draft_keys(seeds, seeded, positions, count, *purposes)
    shape = len(seeds), count
    ahead = positions[:, None] + torch.arange(1, count + 1, device=positions.device)
    same = streams(seeds[:, None].expand(shape), ahead, Purpose.TOKEN)
    own = substreams(streams(seeds, positions, Purpose.DRAFT), count)
    return torch.where(seeded[:, None], same, own)


def uniforms(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return [N, count] float64 in (0, 1), the middles of 2**52 equal parts, for keys [N] int64."""
    if cuda.fits(keys):
        return cuda.noise.numbers(keys, count, torch.float64)
    return torch.ops.outrider.uniforms(keys, count) if _compiled(keys) else _uniform(torch_numbers(keys, count))


def gumbel_argmax(weights: torch.Tensor, keys: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
    """Draw one column per row of [N, V'] float32 weights, which need not sum to 1; never one of weight 0.

    keys: [N] int64. tokens: [V'] int64, of the columns; None: their numbers. Noise belongs to a token, not to a column.
    Returns [N] int64 columns.
    """
    if weights.dim() != 2 or keys.shape != weights.shape[:1]:
        raise ValueError(f"expected weights [N, V'] and keys [N], got {weights.shape} and {keys.shape}")
    if weights.dtype == torch.float32 and native.fits(weights):
        return torch.ops.outrider.gumbel_argmax(weights.contiguous(), keys.contiguous(), tokens)
    return torch_gumbel_argmax(weights, keys, tokens)


def torch_gumbel_argmax(weights: torch.Tensor, keys: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
    """Do `gumbel_argmax` without compiled kernels, on any device."""
    columns = torch.arange(weights.shape[1], device=weights.device) if tokens is None else tokens
    return (torch_exponentials(keys, columns) / weights.double()).argmin(1)


def torch_exponentials(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return [N, M] float64, the noise E = -log(1 - U) of tokens [M] or [N, M] for keys [N], U a token's uniform
    number."""
    x, exponent = torch.frexp(1 - _uniform(_mix(keys[:, None] + _GOLDEN * (tokens + 1))))
    small = x < _SQRT_HALF
    x = torch.where(small, 2 * x, x)
    s = (x - 1) / (x + 1)  # log x = 2 artanh s
    square, series = s * s, torch.full_like(s, 2 / 21)
    for i in range(19, 0, -2):
        series = series * square + 2 / i
    return -((exponent - small.int()).double() * _LOG_2 + s * series)


def _compiled(keys: torch.Tensor) -> bool:
    return keys.is_cpu and native.available()


def torch_numbers(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Do `substreams` without compiled kernels, on any device."""
    return _mix(keys[:, None] + _GOLDEN * torch.arange(1, count + 1, device=keys.device))


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    return (_shift(bits, 11) | 1).double() * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right logically (torch's shift is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
