"""In a target's process, torch's results for a row do not depend on other rows."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from outrider.kernels.cpu import native
from outrider.kernels.linear import torch_linear
from outrider.server.plugin.cpu import experts, fused_ops, recurrent_models, stable_torch

WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid, "sigmoid, in place": lambda x: x.clone().sigmoid_(),
    "sigmoid, into": lambda x: torch.sigmoid(x, out=torch.empty(0, dtype=x.dtype)), "silu": F.silu,
    "silu, in place": lambda x: F.silu(x.clone(), inplace=True), "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"), "softplus": lambda x: F.softplus(x, beta=2),
    "a module": torch.nn.SiLU(),
}  # fmt: skip


@pytest.fixture
def replaced() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        stable_torch.replace_functions(library)
        yield


def by_rows(function: Callable[..., torch.Tensor], *arrays: torch.Tensor) -> torch.Tensor:
    return torch.cat([function(*(x[i, None] for x in arrays)) for i in range(len(arrays[0]))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_functions(way: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    x = (3 * torch.randn(700, 3, generator=torch.Generator().manual_seed(0))).to(dtype)
    theirs = WAYS[way](x)
    request.getfixturevalue("replaced")
    ours = WAYS[way](x)
    assert torch.equal(ours, by_rows(WAYS[way], x))
    torch.testing.assert_close(ours, theirs)


def test_numbers_of_other_types(replaced: None) -> None:
    assert torch.sigmoid(torch.tensor([0, 3])).dtype == torch.float32
    assert torch.sigmoid(torch.tensor(0.0)).item() == 0.5
    near = torch.tensor([1, 1 + 1e-12], dtype=torch.float64)
    assert torch.sigmoid(near)[0] != torch.sigmoid(near)[1]


def test_shared_experts_gates_and_gpt_oss() -> None:
    """Our functions replace SGLang's Triton kernels."""
    draw = torch.Generator().manual_seed(0)
    hidden, gate, shared = (torch.randn(*shape, generator=draw) for shape in ((64, 256), (256,), (64, 3)))

    def added(hidden: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        out = torch.ones_like(shared)
        fused_ops._add_gated(hidden, gate, shared, out, do_add=True)
        return out

    pairs = 3 * torch.randn(64, 6, generator=draw)
    for function, *arrays in (
        (added, hidden, shared),
        (recurrent_models._gate, shared, pairs[:, :3]),
        (lambda x: experts._clamped(x, 1.7, 7.0), pairs),
    ):
        assert torch.equal(function(*arrays), by_rows(function, *arrays))


@pytest.mark.skipif(not native.available(), reason="no compiled kernels here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_products_within_a_forward(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((33, 256), (8, 256), (8,)))
    with forward_context(ForwardContext(attn_backend=SimpleNamespace())):
        ours = stable_torch.linear(x, weight, bias)
        assert torch.equal(ours, by_rows(lambda row: stable_torch.linear(row, weight, bias), x))
    torch.testing.assert_close(
        ours, torch_linear(x, weight, bias), rtol=0.02, atol=0.1 if dtype != torch.float32 else 1e-4
    )
    assert torch.equal(stable_torch.linear(x, weight), torch_linear(x, weight))  # outside a forward it is torch's
