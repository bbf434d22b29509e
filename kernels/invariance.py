"""Rows that do not depend on each other, out of BLAS calls, without knowing how a BLAS sums.

Nothing says in which order a BLAS sums up a row of a product. It may depend on the shape of the call, on the alignment
of its arrays and on the number of threads (Intel's guide to reproducible results names these), and on the row's place.
So every call here has one shape and aligned arrays, and rows stand only in places that were found to give the same bits
(which ones depends on processor and BLAS). The first place is always one of them, so rows are right everywhere;
where it is the only one, each row has a call of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import cache

import torch

logger = logging.getLogger(__name__)

Product = Callable[[torch.Tensor], torch.Tensor]
"""A block [places, ...] times a fixed matrix: [places, ...], in one BLAS call."""

_found: dict[Hashable, int] = {}


def usable_places(shape: Hashable, product: Product, blank: torch.Tensor) -> int:
    """Number of leading places of a block that may be used; found once for each shape and number of threads.

    shape: whatever the order of the sums may depend on, beside the number of threads.
    blank: [places, ...], a block of the shape and type that `product` takes.
    """
    key = shape, torch.get_num_threads()
    if key not in _found:
        _found[key] = count_places(product, blank)
        if _found[key] < len(blank):
            _warn_slow()
    return _found[key]


def count_places(product: Product, blank: torch.Tensor) -> int:
    """Number of leading places of a block that give a row the same bits, whatever the others hold; at least 1.

    Each of as many random rows as there are places is put into all places at once, and beside the other rows.
    """
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
