"""Matrix products with weights as a checkpoint stores them: 2 to 8 bits each, so that a step reads less memory.

The product expands them to exactly the bf16 numbers of the unpacked model: it has the bits of `packed_linear` on these
numbers, for any number of rows and threads. A block is a run of neighbours in depth that share scales:

- Q4_0 to MXFP4: the quantised formats of llama.cpp (ggml-common.h) as in a GGUF file, expanded as by the package gguf
  and rounded to bfloat16. 32 numbers share a scale d, in Q4_1 and Q5_1 a minimum m as well: d * q or d * q + m. In
  superblocks (K, XS) 256 numbers share d and m, and groups of 32 or 16 have scales of 4 to 8 bits for these. Codes of
  IQ4_NL, IQ4_XS and MXFP4 index a table of 16 numbers; MXFP4's d is a power of two.
- GROUPS_32, GROUPS_64, GROUPS_128: (q - z) * s with 4-bit codes and zero points, as in AWQ and GPTQ checkpoints;
  `group_blocks` makes them.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch

from .cpu import native
from .linear import PANEL, PackedWeight

BLOCK = 32
"""Neighbours in depth that the kernels expand at a time; as in cpu/csrc/kernels.h."""
KINDS = {
    "Q4_0": 18,
    "Q4_1": 20,
    "Q5_0": 22,
    "Q5_1": 24,
    "Q8_0": 34,
    "Q2_K": 84,
    "Q3_K": 110,
    "Q4_K": 144,
    "Q5_K": 176,
    "Q6_K": 210,
    "IQ4_NL": 18,
    "IQ4_XS": 136,
    "MXFP4": 17,
    "GROUPS_32": 20,
    "GROUPS_64": 36,
    "GROUPS_128": 68,
}
"""Bytes of a block, by the names of gguf's types; in the order of cpu/csrc/kernels.h."""
SCALES_AT = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}
"""First byte of a block's scale, where it is not 0; a minimum follows the scale."""
MINIMA = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
ROUNDED = 256
"""Added to a kind's number, its index in `KINDS`, where activations are rounded to 8 bits; as in cpu/csrc/kernels.h."""
ACTIVATIONS = ("float", "int8")
"""Kind of products with weights in blocks: activations stay as they are or are rounded to 8 bits."""
HIGHEST_ZERO = 31
"""Zero points have five bits: GPTQ's first format counts 1 more than it stores."""


def block_depth(kind: str) -> int:
    """Return how many neighbours in depth a block of this kind has."""
    if kind.startswith("GROUPS_"):
        return int(kind.removeprefix("GROUPS_"))
    return 256 if kind.endswith(("_K", "_XS")) else BLOCK


def pack_blocks(
    raw: torch.Tensor, kind: str, outputs: int, depth: int, bias: torch.Tensor | None = None, activations: str = "float"
) -> PackedWeight:
    """Lay out a tensor's blocks for the processor, once; the original may then be freed.

    raw: uint8, the tensor's rows one after the other as in the file. kind: a name of `KINDS`. bias: [outputs].
    activations: "int8" for the faster products of cpu/csrc/int_blocks.h, which round them; without compiled kernels the
        result is always "float".
    Packed blocks take as much memory as before, except Q4_K, Q5_K and IQ4_XS: 4.625, 5.625 and 4.5625 bits a weight
    instead of 4.5, 5.5 and 4.25.

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
        return PackedWeight(outputs, depth, None, expand(raw, kind, outputs, depth), bias, index)
    padded = None if bias is None else torch.nn.functional.pad(bias.float(), (0, -outputs % PANEL))
    index += ROUNDED if activations == "int8" else 0
    return PackedWeight(outputs, depth, torch.ops.outrider.pack_blocks(rows, index), None, padded, index)


def quantise_q8_0(weight: torch.Tensor) -> torch.Tensor:
    """Return the Q8_0 blocks nearest to a weight [outputs, depth]: uint8 [outputs, bytes of a row], as in a GGUF
    file."""
    rounded = []
    for rows in weight.split(4096):  # whole, a large weight's copies in float32 would not fit the memory
        blocks = rows.float().view(len(rows), -1, BLOCK)
        scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
        codes = (blocks / scales.float().clamp_min(2**-24)).round().clamp(-127, 127).to(torch.int8)
        rounded.append(torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], -1).flatten(1))
    return torch.cat(rounded)


def group_blocks(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return the blocks of a weight (codes - zeros) * scales, and their kind.

    codes: [outputs, depth], 0 to 15. zeros: [outputs, groups], 0 to 31. scales: [outputs, groups], numbers below 2^100
        that float16 or bfloat16 can hold, in any type. A block is a group: the scale in float32, the zero point in its
        five lowest bits, which are then free, and the codes.

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
    """Return the bfloat16 weight [outputs, depth] of these blocks: gguf's float32 numbers, rounded to nearest even.
    Scales of MXFP4 below 2^-125 count as 0, since some processors flush subnormal numbers to 0."""
    rows = rows_of_blocks(raw, kind, outputs, depth)
    blocks = rows.view(outputs, -1, KINDS[kind])
    if kind.startswith("GROUPS_"):
        scales, zeros = _shared(blocks, kind)
        assert zeros is not None
        pairs = blocks[..., 4:].unflatten(-1, (-1, 1, BLOCK // 2))
        codes = torch.cat([pairs & 15, pairs >> 4], -2).flatten(-3)
        numbers = (codes - zeros[..., None]) * scales[..., None] + 0.0  # no -0, whatever a scale's sign
    else:
        from gguf import GGMLQuantizationType, dequantize

        numbers = torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[kind]))
        if kind == "MXFP4":
            numbers = numbers.view(outputs, -1, BLOCK).where(blocks[..., :1] >= 3, 0)
    return numbers.view(outputs, depth).bfloat16()


def _shared(blocks: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scales d [outputs, depth / B] float32 of blocks [outputs, depth / B, bytes], and minima or zero points m.
    m is None for kinds without either."""
    if kind.startswith("GROUPS_"):
        shared = blocks[..., :4].contiguous().view(torch.int32)[..., 0]
        return (shared & ~HIGHEST_ZERO).view(torch.float32), (shared & HIGHEST_ZERO).float()
    if kind == "MXFP4":  # 2^(e - 128), since the table's numbers are doubled
        exponents = blocks[..., 0].int()
        return ((exponents - 1) << 23).where(exponents >= 3, 0).view(torch.float32), None
    at = SCALES_AT.get(kind, 0)
    halves = blocks[..., at : at + (4 if kind in MINIMA else 2)].contiguous().view(torch.float16).float()
    return halves[..., 0], halves[..., 1] if kind in MINIMA else None


def rows_of_blocks(raw: torch.Tensor, kind: str, outputs: int, depth: int) -> torch.Tensor:
    """Return raw as [outputs, bytes of a row], checked as by `pack_blocks`."""
    if kind not in KINDS:
        raise ValueError(f"blocks of kind {kind} are not known, only {', '.join(KINDS)}")
    if depth % block_depth(kind):
        raise ValueError(f"the depth of {kind} must be a multiple of {block_depth(kind)}, got {depth}")
    size = outputs * (depth // block_depth(kind)) * KINDS[kind]
    if raw.dtype != torch.uint8 or raw.numel() != size:
        raise ValueError(f"a {kind} weight [{outputs}, {depth}] has {size} bytes, got {raw.numel()} of {raw.dtype}")
    rows = raw.contiguous().view(outputs, -1)
    shared = _shared(rows.view(outputs, -1, KINDS[kind]), kind)
    if not all((part.abs() < 2.0**100).all() for part in shared if part is not None):
        raise ValueError(f"a scale of the {kind} weight [{outputs}, {depth}] is not finite, or not below 2^100")
    return rows


@dataclass(frozen=True, slots=True)
class BlockRows:
    """A matrix [outputs, depth] in a GGUF tensor's blocks, indexed like the bfloat16 tensor that it represents.

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
        """Return rows [N] (integers) expanded: [N, depth] bfloat16."""
        if self.raw.is_cpu and native.available():
            return torch.ops.outrider.expand_rows(self.raw, rows.long().contiguous(), list(KINDS).index(self.kind))
        return expand(self.raw[rows], self.kind, len(rows), self.depth)

    def first(self, rows: int) -> Self:
        """Return the first `rows` rows, still in blocks."""
        return replace(self, raw=self.raw[:rows])
