"""Matrix products with 8-bit weights and activations: half the memory traffic of bfloat16, less accurate.

An option, never a default: it serves the quantised model, for which speculation is lossless. Weights are rounded once,
symmetrically, with one scale per output and 64 neighbours in depth; activations at run time, with one scale per row and
the same 64. Integer sums are exact, so rows do not depend on their batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .blocks import BlockWeight, block_linear
from .cpu import native
from .linear import PANEL, PackedWeight, packed_linear

GROUP = 64
"""Neighbours in depth that share a scale; as in cpu/csrc/kernels.h."""


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [outputs, depth] as 8-bit codes and float32 scales, in an order that only `int8_linear` understands."""

    outputs: int
    depth: int
    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None


def pack_int8(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Int8Weight:
    """Round a weight [outputs, depth] (and keep its bias [outputs] in float32); the original may then be freed."""
    if weight.dim() != 2 or not native.fits(weight):
        raise ValueError(
            "int8 weights need the compiled CPU kernels and a float32 or bfloat16 matrix, "
            f"got {weight.dtype} {tuple(weight.shape)} on {weight.device}, kernels: {native.instruction_set()}"
        )
    outputs, depth = weight.shape
    padded = None if bias is None else torch.nn.functional.pad(bias.float(), (0, -outputs % PANEL))
    codes, scales = torch.ops.outrider.pack_int8(weight.contiguous())
    return Int8Weight(outputs, depth, codes, scales, padded)


def int8_linear(x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
    """Return x [..., depth] times the weight, transposed, plus its bias: [..., outputs] in x's type."""
    if x.shape[-1] != weight.depth:
        raise ValueError(f"x has depth {x.shape[-1]}, the weight {weight.depth}")
    return torch.ops.outrider.int8_linear(x.contiguous(), weight.codes, weight.scales, weight.bias, weight.outputs)


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """A weight made of parts, one below the other, each prepared in its own way."""

    parts: tuple[PackedWeight | BlockWeight, ...]

    @property
    def outputs(self) -> int:
        return sum(part.outputs for part in self.parts)

    @property
    def depth(self) -> int:
        return self.parts[0].depth

    @property
    def bias(self) -> None:
        """Parts have no biases."""
        return None


Weight = PackedWeight | Int8Weight | BlockWeight | StackedWeight


def stack(parts: Sequence[PackedWeight | BlockWeight]) -> StackedWeight:
    """Stack weights of one depth, without biases, below each other.

    Raises
    ------
    ValueError
        No parts, parts of several depths, or a bias.
    """
    if len({part.depth for part in parts}) != 1 or any(part.bias is not None for part in parts):
        raise ValueError("a stack needs weights of one depth without biases")
    return StackedWeight(tuple(parts))


def parts_of(weight: Weight) -> Sequence[PackedWeight | Int8Weight | BlockWeight]:
    return weight.parts if isinstance(weight, StackedWeight) else (weight,)


def multiply(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return x [..., depth] times a weight that was prepared in any of these ways."""
    if isinstance(weight, StackedWeight):
        return torch.cat([multiply(x, part) for part in weight.parts], -1)
    if isinstance(weight, BlockWeight):
        return block_linear(x, weight)
    return int8_linear(x, weight) if isinstance(weight, Int8Weight) else packed_linear(x, weight)
