"""Products of experts compared with torch, and the mixture with a CPU's, expert by expert."""

import torch
from gpu_device import TOLERANCE, TYPES, examples, moved, row_error, triton
from hypothesis import given
from hypothesis import strategies as st

from outrider.kernels.cuda import experts
from outrider.kernels.experts import expert_products, run_experts, run_joined_experts
from outrider.kernels.linear import pack


def choices(rows: int, count: int, chosen: int, draw: torch.Generator) -> torch.Tensor:
    """[N, K] int64, different experts for each row; few of many experts are chosen often."""
    liked = torch.rand(rows, count, generator=draw) * torch.linspace(0.1, 1, count)
    return liked.topk(chosen, -1).indices


@examples(12)
@given(
    rows=st.sampled_from([1, 2, 17, 40]),
    shape=st.sampled_from([(1, 1, 8, 16), (4, 2, 48, 80), (8, 3, 65, 130), (16, 8, 64, 64)]),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 2**31),
)
def test_products_equal_torch_and_single_experts(rows, shape, dtype, seed):
    count, chosen, inner, size = shape
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=draw).to(dtype)
    gate_up = (torch.randn(count, 2 * inner, size, generator=draw) / size**0.5).to(dtype)
    down = (torch.randn(count, size, inner, generator=draw) / inner**0.5).to(dtype)
    ids, weights = choices(rows, count, chosen, draw), torch.rand(rows, chosen, generator=draw)

    numbers, order = ids.flatten().sort(stable=True)
    indptr = torch.searchsorted(numbers, torch.arange(count + 1))
    expected = expert_products(x.float(), gate_up.float(), order, indptr, chosen)
    products = experts.expert_products(*moved((x, gate_up, order, indptr)), chosen)
    assert products.dtype == dtype
    assert row_error(products, expected) <= TOLERANCE[dtype]

    with triton():
        products = run_joined_experts(*moved((x, weights, ids, gate_up, down)))
    packed = [(pack(one.float()), pack(other.float())) for one, other in zip(gate_up, down, strict=True)]
    assert row_error(products, run_experts(x.float(), weights, ids, packed)) <= 3 * TOLERANCE[dtype]


def test_an_unchosen_expert_is_not_read():
    weight = torch.randn(3, 16, 32)
    weight[1] = torch.nan
    order, indptr = torch.arange(4), torch.tensor([0, 2, 2, 4])
    products = experts.expert_products(*moved((torch.randn(4, 32), weight, order, indptr)), 1)
    assert bool(products.isfinite().all())
