"""Matrix products with the weights as a checkpoint keeps them: 4 to 8 bits each, so that a step reads less memory.

The product expands them to exactly the bf16 numbers of the unpacked model: its bits are those of `packed_linear` on
them, for any number of rows and threads. A block is some neighbours in depth that share scales:

- Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K: the quantised formats of llama.cpp (ggml-common.h) as in a GGUF file, with the
  meaning that the package gguf gives them, rounded to bfloat16. 32 numbers share a scale d, in Q4_1 a minimum m as
  well: d * q or d * q + m. In superblocks (K) 256 share d and m, and 32 or 16 of them scales of 6 or 8 bits for these.
- GROUPS_32, GROUPS_64, GROUPS_128: (q - z) * s with 4-bit codes and zero points, as AWQ and GPTQ checkpoints mean;
  `group_blocks` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from .cpu import native
from .linear import PANEL, invariant_linear, reference_linear

BLOCK = 32
"""Neighbours in depth that the kernels expand at a time; as in cpu/csrc/kernels.h."""
KINDS = {
    "Q4_0": 18,
    "Q4_1": 20,
    "Q8_0": 34,
    "Q4_K": 144,
    "Q5_K": 176,
    "Q6_K": 210,
    "GROUPS_32": 20,
    "GROUPS_64": 36,
    "GROUPS_128": 68,
}
"""Bytes of a block, by the names of gguf's types; in the order of cpu/csrc/kernels.h."""
ROUNDED = 256
"""Added to a kind's number where activations are rounded to 8 bits; as in cpu/csrc/kernels.h."""
ACTIVATIONS = ("float", "int8")
"""The ways in which weights in blocks are multiplied: with activations as they are, or rounded to 8 bits."""
HIGHEST_ZERO = 31
"""Zero points have five bits: GPTQ's first format counts 1 more than it stores."""


def block_depth(kind: str) -> int:
    """Neighbours in depth of a block of this kind."""
    if kind.startswith("GROUPS_"):
        return int(kind.removeprefix("GROUPS_"))
    return 256 if kind.endswith("_K") else BLOCK


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight [outputs, depth] in blocks, or expanded where there are no compiled kernels.

    kind: index into `KINDS`, with `ROUNDED` added where activations are rounded to 8 bits (`int_blocks`).
    blocks: bytes in an order that only `block_linear` understands; None without compiled kernels.
    plain: [outputs, depth] bfloat16, kept only where `blocks` is None.
    bias: [outputs] or None; float32 and padded to whole panels beside `blocks`.
    """

    outputs: int
    depth: int
    kind: int
    blocks: torch.Tensor | None
    plain: torch.Tensor | None
    bias: torch.Tensor | None

    @property
    def activations(self) -> str:
        """The one of `ACTIVATIONS` that `block_linear` multiplies with."""
        return "int8" if self.kind & ROUNDED else "float"


def pack_blocks(
    raw: torch.Tensor,
    kind: str,
    outputs: int,
    depth: int,
    bias: torch.Tensor | None = None,
    activations: str = "float",
) -> BlockWeight:
    """Lay the blocks of a tensor out for the processor once; the original may then be freed.

    raw: uint8, the tensor's rows one after the other as in the file. kind: a name of `KINDS`. bias: [outputs].
    activations: "int8" for the faster products of `int_blocks`, which round them; without compiled kernels all are
    "float", and the result says so.
    Packed they take as much memory, but Q4_K and Q5_K 4.625 and 5.625 bits a weight instead of 4.5 and 5.5.

    Raises
    ------
    ValueError
        An unknown kind or unknown activations, a depth that is no multiple of the block's, bytes that do not fit the
        shape, a scale that is not finite.
    """
    rows = rows_of_blocks(raw, kind, outputs, depth)
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations are {' or '.join(ACTIVATIONS)}, not {activations}")
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"expected a bias [{outputs}], got {tuple(bias.shape)}")
    index = list(KINDS).index(kind)
    if not raw.is_cpu or not native.available():
        return BlockWeight(outputs, depth, index, None, expand(raw, kind, outputs, depth), bias)
    padded = None if bias is None else torch.nn.functional.pad(bias.float(), (0, -outputs % PANEL))
    index += ROUNDED if activations == "int8" else 0
    return BlockWeight(outputs, depth, index, torch.ops.outrider.pack_blocks(rows, index), None, padded)


def quantise_q8_0(weight: torch.Tensor) -> torch.Tensor:
    """The Q8_0 blocks nearest to a weight [outputs, depth]: uint8 [outputs, bytes of a row], as in a GGUF file."""
    blocks = weight.float().view(len(weight), -1, BLOCK)
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    codes = (blocks / scales.float().clamp_min(2**-24)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], -1).flatten(1)


def block_linear(x: torch.Tensor, weight: BlockWeight) -> torch.Tensor:
    """x [..., depth], float32 or bfloat16, times the weight, transposed, plus its bias: [..., outputs] in x's type."""
    if x.shape[-1] != weight.depth:
        raise ValueError(f"x has depth {x.shape[-1]}, the weight {weight.depth}")
    if weight.blocks is None:
        assert weight.plain is not None
        bias = None if weight.bias is None else weight.bias.to(x.dtype)
        return invariant_linear(x, weight.plain.to(x.dtype), bias)
    return torch.ops.outrider.block_linear(x.contiguous(), weight.blocks, weight.kind, weight.bias, weight.outputs)


def group_blocks(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Blocks of a weight (codes - zeros) * scales, and their kind.

    codes: [outputs, depth], 0 to 15. zeros: [outputs, groups], 0 to 31. scales: [outputs, groups], numbers below 2^100
    that float16 or bfloat16 can hold, in any type. A block is a group: the scale in float32, the zero point in its five
    lowest bits, which are then free, and the codes.

    Raises
    ------
    ValueError
        Groups of another size than 32, 64 or 128, or scales of more bits or from 2^100 on.
    """
    outputs, depth = codes.shape
    groups = scales.shape[1]
    kind = f"GROUPS_{depth // groups}"
    if kind not in KINDS or depth % groups:
        raise ValueError(f"groups must have 32, 64 or 128 numbers, not {depth} / {groups}")
    shared = scales.float().contiguous().view(torch.int32)
    if (shared & HIGHEST_ZERO).any():
        raise ValueError("scales must be numbers of float16 or bfloat16")
    if not (scales.abs() < 2.0**100).all():
        raise ValueError("scales must be below 2^100")
    shared = shared | zeros.int()
    low, high = codes.to(torch.uint8).reshape(outputs, groups, -1, 2, BLOCK // 2).unbind(-2)
    blocks = [shared.view(torch.uint8).view(outputs, groups, 4), (low | high << 4).flatten(2)]
    return torch.cat(blocks, -1).flatten(1), kind


def expand(raw: torch.Tensor, kind: str, outputs: int, depth: int) -> torch.Tensor:
    """The bfloat16 weight [outputs, depth] of these blocks: what gguf gives in float32, rounded to nearest even.

    Each line rounds once in float32 at most: scales have up to 18 bits, times a code up to 23.
    """
    codes, d, m, scales, minima = unpack(raw, kind, outputs, depth)
    codes = codes.view(outputs, d.shape[1], 1 if scales is None else scales.shape[2], -1)
    d = d[..., None, None]
    if kind.startswith("GROUPS_"):
        assert m is not None
        weight = (codes - m[..., None, None]) * d + 0.0  # no -0, whatever a scale's sign
    elif scales is None:
        weight = d * codes if m is None else d * codes + m[..., None, None]
    else:
        weight = d * scales[..., None] * codes
        if minima is not None and m is not None:
            weight = weight - (m[..., None] * minima)[..., None]
    return weight.view(outputs, depth).bfloat16()


class Unpacked(NamedTuple):
    """The numbers in a weight's blocks of B neighbours in depth.

    codes: [outputs, depth] signed integers. d: [outputs, depth / B] float32. m: the same, zero points of groups; None
    without. scales, minima: of the sub-blocks [outputs, depth / B, sub-blocks] integers; None without.
    """

    codes: torch.Tensor
    d: torch.Tensor
    m: torch.Tensor | None
    scales: torch.Tensor | None
    minima: torch.Tensor | None


def unpack(raw: torch.Tensor, kind: str, outputs: int, depth: int) -> Unpacked:
    """The numbers in these blocks, as they are stored."""
    blocks = rows_of_blocks(raw, kind, outputs, depth).view(outputs, -1, KINDS[kind])
    m = scales = minima = None
    if kind.startswith("GROUPS_"):
        shared = blocks[..., :4].contiguous().view(torch.int32)
        d, m = (shared & ~HIGHEST_ZERO).view(torch.float32), (shared & HIGHEST_ZERO).float()
        codes = _nibbles(blocks[..., 4:], BLOCK // 2)
    elif kind in ("Q4_K", "Q5_K"):
        d, m = _halves(blocks[..., :4])
        scales, minima = (x.int() for x in _six_bits(blocks[..., 4:16]))
        codes = _nibbles(blocks[..., -128:], 32).flatten(-3, -2)
        if kind == "Q5_K":
            codes = codes + (blocks[..., None, 16:48] >> torch.arange(8)[:, None] & 1) * 16
    elif kind == "Q6_K":
        (d,) = _halves(blocks[..., 208:])
        scales = blocks[..., 192:208].contiguous().view(torch.int8).int()
        high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.arange(0, 8, 2)[:, None] & 3
        codes = _nibbles(blocks[..., :128], 64).flatten(2) + high.flatten(2) * 16 - 32
    elif kind == "Q8_0":
        (d,) = _halves(blocks[..., :2])
        codes = blocks[..., 2:].contiguous().view(torch.int8).int()
    elif kind == "Q4_1":
        d, m = _halves(blocks[..., :4])
        codes = _nibbles(blocks[..., 4:], 16)
    else:
        (d,) = _halves(blocks[..., :2])
        codes = _nibbles(blocks[..., 2:], 16) - 8
    return Unpacked(codes.reshape(outputs, depth), d[..., 0], None if m is None else m[..., 0], scales, minima)


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pairs of bytes [..., 2 n] as float32: n of [..., 1]."""
    return x.contiguous().view(torch.float16).float().split(1, -1)


def _nibbles(x: torch.Tensor, width: int) -> torch.Tensor:
    """Bytes [..., n * width] as [..., n, 2, width] numbers, the lower halves of `width` bytes before the upper ones."""
    x = x.unflatten(-1, (-1, width))
    return torch.stack([x & 15, x >> 4], -2).int()


def _six_bits(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight scales and minima [..., 8] in the twelve bytes of a superblock."""
    first, second, both = x.split(4, -1)
    scales = torch.cat([first & 63, both & 15 | first >> 6 << 4], -1)
    return scales, torch.cat([second & 63, both >> 4 | second >> 6 << 4], -1)


def reference_block_linear(
    x: torch.Tensor, raw: torch.Tensor, kind: str, outputs: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Reference of `block_linear(x, pack_blocks(raw, kind, outputs, depth, bias))`, in float64."""
    return reference_linear(x, expand(raw, kind, outputs, x.shape[-1]), bias)


def rows_of_blocks(raw: torch.Tensor, kind: str, outputs: int, depth: int) -> torch.Tensor:
    """raw as [outputs, bytes of a row], checked as by `pack_blocks`."""
    if kind not in KINDS:
        raise ValueError(f"blocks of kind {kind} are not known, only {', '.join(KINDS)}")
    if depth % block_depth(kind):
        raise ValueError(f"the depth of {kind} must be a multiple of {block_depth(kind)}, got {depth}")
    size = outputs * (depth // block_depth(kind)) * KINDS[kind]
    if raw.dtype != torch.uint8 or raw.numel() != size:
        raise ValueError(f"a {kind} weight [{outputs}, {depth}] has {size} bytes, got {raw.numel()} of {raw.dtype}")
    rows = raw.contiguous().view(outputs, -1)
    blocks = rows.view(-1, KINDS[kind])
    if kind.startswith("GROUPS_"):
        scales = blocks[:, :4].contiguous().view(torch.float32)
    else:
        both = slice(4) if kind in ("Q4_1", "Q4_K", "Q5_K") else slice(2)
        scales = blocks[:, slice(208, 210) if kind == "Q6_K" else both].contiguous().view(torch.float16)
    if not scales.isfinite().all():
        raise ValueError(f"a scale of the {kind} weight [{outputs}, {depth}] is not finite")
    return rows


@dataclass(frozen=True, slots=True)
class BlockRows:
    """A matrix [outputs, depth] in a GGUF tensor's blocks, indexed like the bfloat16 tensor that it stands for.

    raw: [outputs, bytes of a row] uint8, as in the file; it may be mapped from there. kind: a name of `blocks.KINDS`.

    Raises
    ------
    ValueError
        The bytes do not fit the kind or the depth, or a scale is not finite.
    """

    raw: torch.Tensor
    kind: str
    depth: int

    def __post_init__(self) -> None:
        rows_of_blocks(self.raw, self.kind, len(self.raw), self.depth)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.raw.shape[0], self.depth))

    @property
    def device(self) -> torch.device:
        return self.raw.device

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [N] integers. Returns [N, depth] bfloat16."""
        if self.raw.is_cpu and native.available():
            return torch.ops.outrider.expand_rows(self.raw, rows.long().contiguous(), list(KINDS).index(self.kind))
        return expand(self.raw[rows], self.kind, len(rows), self.depth)

    def first(self, rows: int) -> BlockRows:
        """The first so many rows, still in blocks."""
        return replace(self, raw=self.raw[:rows])
