"""Low-rank products: correct, and independent of other rows."""

from functools import partial

import pytest
import torch
from batches import check_rows_are_independent
from margins import EPSILON
from references import reference_low_rank_product

from outrider.kernels.low_rank import Part, low_rank_product, pack_low_rank


def parts_of(ranks: list[int], sizes: list[int], depth: int) -> list[Part]:
    draw, first, parts = torch.Generator().manual_seed(sum(ranks)), 0, []
    for rank, size in zip(ranks, sizes, strict=True):
        down, up = (torch.randn(shape, generator=draw) / shape[1] ** 0.5 for shape in ((rank, depth), (size, rank)))
        if rank:
            parts.append(Part(first, down, up, 0.5 + rank))
        first += size
    return parts


@pytest.mark.parametrize("ranks", [[1], [4, 0, 7], [0, 3], [64, 64, 64]], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 160 * EPSILON), (torch.bfloat16, 0.05)], ids=str)
def test_products_of_all_parts(ranks, dtype, tolerance):
    sizes = [40, 8, 24][: len(ranks)]
    parts, x = parts_of(ranks, sizes, 96), torch.randn(21, 96).to(dtype)
    got = low_rank_product(x, pack_low_rank(parts, sum(sizes), dtype))
    expected = reference_low_rank_product(x, parts, sum(sizes))
    assert (got.dtype, got.shape) == (dtype, expected.shape)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    first = 0
    for rank, size in zip(ranks, sizes, strict=True):
        if not rank:
            assert not got[:, first : first + size].any()
        first += size


@pytest.mark.parametrize("rank", [3, 16])
def test_a_row_does_not_depend_on_its_batch(rank):
    weight = pack_low_rank(parts_of([rank, rank], [64, 32], 96), 96, torch.float32)
    check_rows_are_independent(partial(low_rank_product, weight=weight), torch.randn(40, 96), (1, 2, 7, 17))
