"""Matrix products with independent rows, and fast ones for the few rows of a decode step.

`packed_linear` reads a weight once per step, from panels laid out for the processor; its sum over the depth has one
order for any number of rows, so a token has the same bits when it is verified in a batch and when it is decoded alone.
torch's float32 product does not guarantee this; `invariant_linear` does, on any BLAS.

The order in which a BLAS sums up a row of a product is not specified. It may depend on the shape of the call, on the
alignment of its arrays, on the number of threads (Intel's guide to reproducible results names these), and on the row's
place. So every call here has one shape and aligned arrays, and uses only row places that a test showed to give the same
bits (they depend on processor and BLAS). The first place always qualifies, so rows are right everywhere; where it is
the only one, each row has its own call.
"""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn.functional import linear as torch_linear

from .cpu import native

logger = logging.getLogger(__name__)

PANEL = 64
"""Outputs of a packed panel; as in cpu/csrc/kernels.h."""
ROW_BLOCK = 16
"""Rows of every call of torch's float32 product."""
ALIGNMENT = 64
"""Bytes; torch's allocator aligns all arrays to it, but a weight may be a view into one."""

Product = Callable[[torch.Tensor], torch.Tensor]
"""A block [places, ...] times a fixed matrix: [places, ...], in one BLAS call."""

_found: dict[Hashable, int] = {}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [outputs, depth] in panels, or unchanged (expanded, if it was in blocks) where there are no compiled
    kernels.

    panels: flat, only `packed_linear` understands it; None without compiled kernels.
    plain: [outputs, depth], kept only where `panels` is None.
    bias: [outputs] or None; with `panels`, float32 and padded to whole panels.
    kind: of the blocks in the panels, see `blocks.pack_blocks`; -1: they are numbers.
    """

    outputs: int
    depth: int
    panels: torch.Tensor | None
    plain: torch.Tensor | None
    bias: torch.Tensor | None
    kind: int = -1


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
    """Prepare a weight [outputs, depth] (and bias [outputs]) once; the original may then be freed."""
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"expected weight [outputs, depth] and bias [outputs], got {tuple(weight.shape)} and "
            f"{None if bias is None else tuple(bias.shape)}"
        )
    outputs, depth = weight.shape
    if depth % 2 or not native.fits(weight):
        return PackedWeight(outputs, depth, None, weight, bias)
    padded = None if bias is None else torch.nn.functional.pad(bias.float(), (0, -outputs % PANEL))
    return PackedWeight(outputs, depth, torch.ops.outrider.pack_linear(weight.contiguous()), None, padded)


def packed_linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Return x [..., depth] times the packed weight, transposed, plus its bias: [..., outputs] in x's type."""
    if x.shape[-1] != weight.depth:
        raise ValueError(f"x has depth {x.shape[-1]}, the weight {weight.depth}")
    if weight.panels is None:
        assert weight.plain is not None
        return invariant_linear(x, weight.plain.to(x.dtype), None if weight.bias is None else weight.bias.to(x.dtype))
    return torch.ops.outrider.packed_linear(x.contiguous(), weight.panels, weight.kind, weight.bias, weight.outputs)


def invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch_linear,
) -> torch.Tensor:
    """Do torch's linear, for float32 x in blocks of one shape, so that a row's bits do not depend on the rest.

    x: [..., depth]. weight: [outputs, depth]. bias: [outputs] or None. Other types go to torch as they are.
    product: maps [ROW_BLOCK, depth] and the weight to [ROW_BLOCK, outputs], by any BLAS.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return torch_linear(x, weight, bias)
    rows, block = x.reshape(-1, x.shape[-1]), x.new_zeros(ROW_BLOCK, x.shape[-1])
    shape = product, weight.shape, weight.stride(), weight.data_ptr() % ALIGNMENT
    places = usable_places(shape, lambda block: product(block, weight), block)
    out = x.new_empty(len(rows), weight.shape[0])
    for start in range(0, len(rows), places):
        taken = rows[start : start + places]
        block[: len(taken)] = taken
        out[start : start + places] = product(block, weight)[: len(taken)]
    return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], weight.shape[0])


def usable_places(shape: Hashable, product: Product, blank: torch.Tensor) -> int:
    """Return how many leading places of a block may be used; tested once for each shape and number of threads.

    shape: everything that the order of the sums may depend on, apart from the number of threads.
    blank: [places, ...], a block of the shape and type that `product` takes.
    """
    key = shape, torch.get_num_threads()
    if key not in _found:
        _found[key] = count_places(product, blank)
        if _found[key] < len(blank):
            _warn_slow()
    return _found[key]


def count_places(product: Product, blank: torch.Tensor) -> int:
    """Count the leading places of a block that give a row the same bits, whatever the other rows hold; at least 1. It
    uses as many random rows as places. Each is put into all places at once, and among the other rows."""
    rows = torch.empty_like(blank).normal_(generator=torch.Generator().manual_seed(0))
    mixed, count = product(rows), len(rows)
    for i, row in enumerate(rows):
        everywhere = product(row.expand_as(rows).contiguous())
        alike = (everywhere == everywhere[0]).flatten(1).all(1)
        alike[i] &= torch.equal(mixed[i], everywhere[i])
        count = min(count, int(alike.int().cumprod(0).sum()))
    return max(count, 1)


@cache
def _warn_slow() -> None:
    logger.warning(
        "torch's float32 products depend on a row's place here: fewer rows go into each, for the same result, which is "
        "slow; with a C++ compiler there are compiled kernels, which do not"
    )
