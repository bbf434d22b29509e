"""Low-rank products that are added to a weight's own: LoRA adapters (arXiv:2106.09685).

An adapter changes a weight W to W + s B A, with A [rank, depth] and B [outputs, rank]. W may be shared, in blocks or in
8 bits, so its product stays as it is, and s B (A x) is added to it. Rows are independent, as in `linear.packed_linear`:
a token has the same bits in a batch and alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .linear import PackedWeight, pack, packed_linear


@dataclass(frozen=True, slots=True)
class Part:
    """A low-rank change of some of a weight's outputs.

    first: the first of these outputs. down: A [rank, depth]. up: B [outputs, rank]. scale: s.
    """

    first: int
    down: torch.Tensor
    up: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class LowRankWeight:
    """The changes of a weight's outputs, prepared: A of all parts stacked by rows, s B of all parts by columns."""

    down: PackedWeight
    up: PackedWeight


def pack_low_rank(parts: Sequence[Part], outputs: int, dtype: torch.dtype) -> LowRankWeight:
    """Prepare the changes of a weight with `outputs` outputs, in its type; at least one part, all of one depth."""
    ranks = [len(part.down) for part in parts]
    up = torch.zeros(outputs, sum(ranks) + sum(ranks) % 2)  # the kernels take an even depth
    begin = 0
    for part, rank in zip(parts, ranks, strict=True):
        up[part.first : part.first + len(part.up), begin : begin + rank] = part.scale * part.up.float()
        begin += rank
    down = torch.cat([part.down.float() for part in parts])
    down = torch.nn.functional.pad(down, (0, 0, 0, up.shape[1] - begin))
    return LowRankWeight(pack(down.to(dtype)), pack(up.to(dtype)))


def low_rank_product(x: torch.Tensor, weight: LowRankWeight) -> torch.Tensor:
    """Return the changes [N, outputs] of the products of x [N, depth]."""
    return packed_linear(packed_linear(x, weight.down), weight.up)
