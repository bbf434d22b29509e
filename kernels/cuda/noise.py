"""The noise of the seeded draw, with the bits of `outrider.kernels.noise`; the kernels that draw are its callers.

Launched with `enable_fp_fusion=False` (`BITS`): a product and a sum that become one instruction round once instead of
twice, and the noise would no longer have the bits that it has on a CPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl

BITS: dict[str, Any] = {"enable_fp_fusion": False}
CHUNK = 8192
"""Columns of one program: 32 KB of float32, eight loads of 16 bytes in each of 128 threads twice over. Fixed, so that
sums over a row have one order in every batch; 19 programs for a row of 152 k use the GPU even with few rows."""
BLOCK = 1024
SMALL = 128
GOLDEN = tl.constexpr(-7046029254386353131)
MIX_1 = tl.constexpr(-4658895280553007687)
MIX_2 = tl.constexpr(-7723592293110705685)
NOBODY = tl.constexpr(2**31 - 1)


def chunks(width: int) -> int:
    """Return the number of programs that share a row of `width` columns."""
    return max(1, triton.cdiv(width, CHUNK))


@triton.jit
def mix(x):
    """SplitMix64's finaliser of int64."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def uniform(bits):
    """float64 in (0, 1) of int64."""
    return (((bits >> 11) & 0x1FFFFFFFFFFFFF) | 1).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def exponential(key, token):
    """float64 noise E = -log(1 - U) of int64 tokens: some 40 operations in double precision, all rounded."""
    bits = (1.0 - uniform(mix(key + GOLDEN * (token + 1)))).to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF) - 1022
    x = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    small = x < 0.7071067811865476
    x = tl.where(small, 2 * x, x)
    exponent = tl.where(small, exponent - 1, exponent)
    s = (x - 1.0) / (x + 1.0)
    square = s * s
    series = square * 0.0 + 2 / 21
    for i in tl.static_range(10):
        series = series * square + 2 / (19 - 2 * i)
    return -(exponent.to(tl.float64) * 0.6931471805599453 + s * series)


@triton.jit
def least(scores, tokens):
    """Return the least of scores [N] float64 and its first token, of [N] int32; (inf, NOBODY) if all are infinite."""
    score = tl.min(scores, 0)
    token = tl.min(tl.where(scores == score, tokens, NOBODY), 0)
    token = tl.where(score < float("inf"), token, NOBODY)
    return score, token


@triton.jit(do_not_specialize=["count", "purpose"])
def streams_kernel(seeds, positions, keys, count, purpose, BLOCK: tl.constexpr):
    """Reads 16 bytes a key and writes 8."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds + i, mask=i < count, other=0)
    position = tl.load(positions + i, mask=i < count, other=0)
    tl.store(keys + i, mix(mix(seed + (position * 0 + purpose) * GOLDEN) + position * GOLDEN), mask=i < count)


def streams(seeds: torch.Tensor, positions: torch.Tensor, purpose: int) -> torch.Tensor:
    keys = torch.empty(seeds.shape, dtype=torch.int64, device=seeds.device)
    count = seeds.numel()
    if count:
        arguments = seeds.contiguous(), positions.contiguous(), keys, count, purpose
        streams_kernel[(triton.cdiv(count, SMALL),)](*arguments, BLOCK=SMALL)
    return keys


@triton.jit(do_not_specialize=["total", "count"])
def numbers_kernel(keys, out, total, count, UNIFORM: tl.constexpr, BLOCK: tl.constexpr):
    """Writes 8 bytes a number."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + i // count, mask=i < total, other=0)
    number = mix(key + GOLDEN * (i % count + 1).to(tl.int64))
    tl.store(out + i, uniform(number) if UNIFORM else number, mask=i < total)


def numbers(keys: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [N, count] of keys [N]: `substreams` in int64, `uniforms` in float64."""
    out = torch.empty((len(keys), count), dtype=dtype, device=keys.device)
    if out.numel():
        arguments = keys.contiguous(), out, out.numel(), count
        numbers_kernel[(triton.cdiv(out.numel(), SMALL),)](
            *arguments, UNIFORM=dtype == torch.float64, BLOCK=SMALL, **BITS
        )
    return out


@triton.jit(do_not_specialize=["total", "count", "same_purpose", "own_purpose"])
def draft_keys_kernel(
    seeds, seeded, positions, keys, total, count, same_purpose, own_purpose, BLOCK: tl.constexpr
):  # fmt: skip
    """Writes 8 bytes a key."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, r, k = i < total, i // count, (i % count + 1).to(tl.int64)
    seed, position = tl.load(seeds + r, mask=inside, other=0), tl.load(positions + r, mask=inside, other=0)
    same = mix(mix(seed + (position * 0 + same_purpose) * GOLDEN) + (position + k) * GOLDEN)
    own = mix(mix(mix(seed + (position * 0 + own_purpose) * GOLDEN) + position * GOLDEN) + GOLDEN * k)
    tl.store(keys + i, tl.where(tl.load(seeded + r, mask=inside, other=0) != 0, same, own), mask=inside)


def draft_keys(
    seeds: torch.Tensor, seeded: torch.Tensor, positions: torch.Tensor, count: int, same_purpose: int, own_purpose: int
) -> torch.Tensor:
    keys = seeds.new_empty(len(seeds), count)
    if keys.numel():
        arguments = seeds, seeded, positions, keys, keys.numel(), count, same_purpose, own_purpose
        draft_keys_kernel[(triton.cdiv(keys.numel(), SMALL),)](*arguments, BLOCK=SMALL)
    return keys
