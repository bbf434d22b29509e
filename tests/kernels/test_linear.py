from functools import partial

import pytest
import torch
from batches import check_rows_are_independent
from margins import assert_near
from references import reference_linear

from outrider.kernels.cpu import native
from outrider.kernels.linear import invariant_linear, pack, packed_linear

SHAPES = pytest.mark.parametrize(("outputs", "depth"), [(576, 1536), (200, 64), (37, 18), (64, 7), (1, 2)])
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def weight_and_rows(outputs: int, depth: int, rows: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(outputs + depth)
    weight = torch.randn(outputs, depth, generator=generator) * depth**-0.5
    return weight.to(dtype), torch.randn(rows, depth, generator=generator).to(dtype)


@SHAPES
@TYPES
@pytest.mark.parametrize("rows", [0, 1, 5, 6, 7, 130])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_equals_reference(outputs, depth, rows, dtype, with_bias):
    weight, x = weight_and_rows(outputs, depth, rows, dtype)
    bias = torch.linspace(-1, 1, outputs).to(dtype) if with_bias else None
    got = packed_linear(x, pack(weight, bias))
    assert got.dtype == dtype
    assert_near(got, reference_linear(x, weight, bias), depth)


def test_leading_dimensions_and_strided_rows():
    weight, x = weight_and_rows(96, 64, 24)
    expected = reference_linear(x, weight)
    torch.testing.assert_close(packed_linear(x.view(2, 3, 4, 64), pack(weight)), expected.view(2, 3, 4, 96))
    torch.testing.assert_close(invariant_linear(x.view(2, 12, 64), weight), expected.view(2, 12, 96))
    wide = torch.cat([x, x], dim=1)
    torch.testing.assert_close(packed_linear(wide[:, :64], pack(weight)), expected)


@pytest.mark.parametrize("threads", [1, 2, 4])  # with four, MKL's sums depend on a row's place in some shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if native.available() else [torch.float32], ids=str)
@pytest.mark.parametrize(("outputs", "depth"), [(960, 576), (576, 1536), (37, 18)])
def test_a_row_does_not_depend_on_its_batch(outputs, depth, dtype, threads):
    weight, x = weight_and_rows(outputs, depth, 130, dtype)
    torch.set_num_threads(threads)
    operations = [partial(packed_linear, weight=pack(weight))]
    if dtype == torch.float32:
        operations.append(partial(invariant_linear, weight=weight))
    for operation in operations:
        check_rows_are_independent(operation, x, (1, 2, 3, 4, 5, 8, 9, 13, 64, 97))


def test_wrong_shapes_are_explained():
    weight, x = weight_and_rows(8, 4, 3)
    with pytest.raises(ValueError, match="x has depth 3, the weight 4"):
        packed_linear(x[:, :3], pack(weight))
    with pytest.raises(ValueError, match="expected weight"):
        pack(weight, torch.zeros(7))
