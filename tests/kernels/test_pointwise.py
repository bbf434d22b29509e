"""Elementwise functions: torch's values, and the same bits at every place."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from outrider.kernels import pointwise

Function = Callable[..., torch.Tensor]
FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "sigmoid": (pointwise.sigmoid, torch.sigmoid),
    "silu": (pointwise.silu, F.silu),
    "gelu": (pointwise.gelu, F.gelu),
    "gelu tanh": (lambda x: pointwise.gelu(x, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "softplus": (pointwise.softplus, F.softplus),
    "softplus of 2": (lambda x: pointwise.softplus(x, 2, 9), lambda x: F.softplus(x, 2, 9)),
}
TORCHS: dict[str, Function] = {
    "cos": torch.cos, "erf": torch.erf, "exp": torch.exp, "expm1": torch.expm1, "log": lambda x: x.abs().log(),
    "log1p": lambda x: x.abs().log1p(), "reciprocal": torch.reciprocal, "rsqrt": lambda x: x.float().abs().rsqrt(),
    "sin": torch.sin, "tanh": torch.tanh,
}  # fmt: skip
"""Torch's functions in served models (tests/server/model/test_families_invariance.py), or ours."""
PLACED = {name: ours for name, (ours, _) in FUNCTIONS.items()} | TORCHS
ALL = pytest.mark.parametrize("name", FUNCTIONS)
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Enough for three threads that split within a vector."""
    return (4 * torch.randn(100_003, generator=torch.Generator().manual_seed(0))).to(dtype)


@ALL
@TYPES
def test_values(name: str, dtype: torch.dtype) -> None:
    ours, theirs = FUNCTIONS[name]
    x = torch.cat([numbers(dtype), torch.tensor([0.0, -200.0, 200.0, -17.0, 17.0, torch.inf], dtype=dtype)])
    rounding = 2**-7 if dtype == torch.bfloat16 else 2e-6
    assert ours(x).dtype == dtype
    torch.testing.assert_close(ours(x), theirs(x.double()).to(dtype), rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("name", PLACED)
@TYPES
def test_bits_do_not_depend_on_the_place(name: str, dtype: torch.dtype) -> None:
    ours, x = PLACED[name], numbers(dtype)
    torch.set_num_threads(1)
    expected = ours(x)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(ours(x), expected)
        assert torch.equal(ours(x[5:]), expected[5:])
        assert torch.equal(ours(x[1:].view(2, -1).T), expected[1:].view(2, -1).T)
    for length in range(1, 20):
        for first in range(0, 2000, length):
            assert torch.equal(ours(x[first : first + length].clone()), expected[first : first + length])


def test_gradients() -> None:
    for ours, theirs in FUNCTIONS.values():
        x, y = (torch.linspace(-5, 5, 41, dtype=torch.float64).requires_grad_() for _ in range(2))
        ours(x).sum().backward()
        theirs(y).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
