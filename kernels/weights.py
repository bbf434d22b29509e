"""A weight prepared in any of several ways: panels, blocks, or parts of both below each other."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .blocks import BLOCK, pack_blocks, quantise_q8_0
from .linear import PackedWeight, pack, packed_linear


def pack_int8(weight: torch.Tensor, bias: torch.Tensor | None = None, activations: str = "int8") -> PackedWeight:
    """Round a weight [outputs, depth] to 8 bits, as blocks of Q8_0; the original may then be freed. Where blocks do not
    divide the depth, the weight stays as it is. activations: as in `pack_blocks`."""
    outputs, depth = weight.shape
    if depth % BLOCK:
        return pack(weight, bias)
    return pack_blocks(quantise_q8_0(weight), "Q8_0", outputs, depth, bias, activations)


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """A weight made of parts, one below the other, each prepared in its own way."""

    parts: tuple[PackedWeight, ...]

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


Weight = PackedWeight | StackedWeight


def stack(parts: Sequence[PackedWeight]) -> StackedWeight:
    """Stack weights of one depth, without biases, below each other.

    Raises
    ------
    ValueError
        No parts, parts of several depths, or a bias.
    """
    if len({part.depth for part in parts}) != 1 or any(part.bias is not None for part in parts):
        raise ValueError("a stack needs weights of one depth without biases")
    return StackedWeight(tuple(parts))


def parts_of(weight: Weight) -> Sequence[PackedWeight]:
    return weight.parts if isinstance(weight, StackedWeight) else (weight,)


def multiply(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return x [..., depth] times a weight that was prepared in any of these ways."""
    if isinstance(weight, StackedWeight):
        return torch.cat([multiply(x, part) for part in weight.parts], -1)
    return packed_linear(x, weight)
