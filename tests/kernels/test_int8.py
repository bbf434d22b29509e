from functools import partial

import pytest
import torch
from batches import check_rows_are_independent
from references import reference_int8_linear, rounded

from outrider.kernels.cpu import native
from outrider.kernels.int8 import GROUP, int8_linear, pack_int8

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiled kernels here")


def weight_and_rows(outputs: int, depth: int, rows: int, dtype: torch.dtype):
    """Quarters of a code with power-of-two scales, so that rounding is exact."""
    generator = torch.Generator().manual_seed(outputs + depth)
    matrices = []
    for count in (outputs, rows):
        quarters = torch.randint(-4 * 127, 4 * 127 + 1, (count, depth), generator=generator) / 4
        quarters[:, ::GROUP] = 127
        matrices.append((quarters * 2.0**-9).to(dtype))
    return matrices


@pytest.mark.parametrize(("outputs", "depth"), [(192, 576), (70, 64), (37, 18), (64, 65)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 50])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_reference(outputs, depth, dtype, tolerance, rows, with_bias):
    weight, x = weight_and_rows(outputs, depth, rows, dtype)
    bias = torch.linspace(-1, 1, outputs).to(dtype) if with_bias else None
    got = int8_linear(x, pack_int8(weight, bias))
    assert got.dtype == dtype
    torch.testing.assert_close(got, reference_int8_linear(x, weight, bias), rtol=tolerance, atol=tolerance)


def test_extreme_codes_do_not_overflow():
    weight, x = torch.full((64, 256), -3.0), torch.full((2, 256), 5.0)
    torch.testing.assert_close(int8_linear(x, pack_int8(weight)), torch.full((2, 64), -3.0 * 5 * 256))
    assert not int8_linear(torch.zeros(1, 256), pack_int8(weight)).any()


def test_rounding_error_is_small():
    weight, x = weight_and_rows(192, 576, 20, torch.float32)
    exact = x @ weight.T
    error = (int8_linear(x, pack_int8(weight)) - exact).norm() / exact.norm()
    assert error < 0.012
    assert (rounded(x) - x).abs().max() <= x.abs().max() / 127


def test_a_row_does_not_depend_on_its_batch():
    weight, x = weight_and_rows(192, 576, 67, torch.bfloat16)
    check_rows_are_independent(partial(int8_linear, weight=pack_int8(weight)), x, (1, 2, 3, 4, 8, 65))


def test_wrong_shapes_are_explained():
    weight, x = weight_and_rows(64, 64, 2, torch.float32)
    with pytest.raises(ValueError, match="depth 63"):
        int8_linear(x[:, :63], pack_int8(weight))
    with pytest.raises(ValueError, match="float32 or bfloat16 matrix"):
        pack_int8(weight.double())
