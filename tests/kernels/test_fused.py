import pytest
import torch
from margins import EPSILON
from references import plain

from outrider.kernels import fused
from outrider.kernels.cpu import native

TYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 576 * EPSILON), (torch.bfloat16, 2**-7)], ids=["float32", "bfloat16"]
)


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(dtype: torch.dtype, rotary_dim: int = 64) -> torch.Tensor:
    frequencies = 10_000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    phases = torch.arange(500)[:, None] * frequencies
    return torch.cat([phases.cos(), phases.sin()], dim=-1).to(dtype)


@TYPES
@pytest.mark.parametrize("shape", [(1, 576), (37, 576), (3, 5, 48), (4, 50)], ids=str)
def test_norms(shape, dtype, tolerance):
    x, residual = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype, seed=1)
    weight = 1 + 0.1 * numbers(shape[-1], dtype=dtype, seed=2)
    expected = plain(fused.rms_norm, x, weight, 1e-5)
    torch.testing.assert_close(fused.rms_norm(x, weight, 1e-5), expected, rtol=tolerance, atol=tolerance)
    sums, expected_sums = residual.clone(), residual.clone()
    got = fused.add_rms_norm(x, sums, weight, 1e-5)
    expected = plain(fused.add_rms_norm, x, expected_sums, weight, 1e-5)
    assert torch.equal(sums, expected_sums)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


GATES = {
    "silu": (fused.silu_mul, torch.nn.functional.silu),
    "gelu": (fused.gelu_mul, lambda gate: torch.nn.functional.gelu(gate, approximate="tanh")),
}


@TYPES
@pytest.mark.parametrize(("multiply", "activation"), GATES.values(), ids=GATES)
def test_gated_products(multiply, activation, dtype, tolerance):
    x = numbers(29, 2 * 1536, dtype=dtype) * 20
    x[0, :4] = torch.tensor([0.0, -1000.0, 1000.0, -88.0])
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(multiply(x), (activation(gate) * up).to(dtype), rtol=tolerance, atol=1e-5)


@TYPES
@pytest.mark.parametrize("wide_angles", [True, False])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_rope_and_cache_write(dtype, tolerance, wide_angles, rotary_dim):
    qkv = numbers(11, 5 + 2 + 2, 64, dtype=dtype)
    cos_sin = angles(torch.float32 if wide_angles else dtype, rotary_dim)
    positions, slots = torch.randint(0, 500, (11,)), torch.randperm(40)[:11]
    outcomes = []
    for run in (lambda operation, *arguments: operation(*arguments), plain):
        q, k, v = qkv.clone().split([5, 2, 2], dim=1)
        pools = torch.zeros(2, 40, 2, 64, dtype=dtype)
        run(fused.rope_write, q, k, v, positions, cos_sin, pools[0], pools[1], slots)
        outcomes.append((q, k, v, pools))
    torch.testing.assert_close(*outcomes, rtol=tolerance, atol=tolerance)
    assert torch.equal(outcomes[0][3][0, slots], outcomes[0][1])
    alone = [x.clone() for x in qkv.split([5, 2, 2], dim=1)]
    fused.rope(alone[0], alone[1], positions, cos_sin)
    assert torch.equal(alone[0], outcomes[0][0])


def test_rope_turns_by_the_position():
    q = torch.zeros(1, 1, 64)
    q[0, 0, 0] = 1
    fused.rope(q, q.clone(), torch.tensor([3]), angles(torch.float32))
    torch.testing.assert_close(q[0, 0, [0, 32]], torch.tensor([3.0, 3.0]) * 0 + torch.tensor([-0.9899925, 0.14112]))


@pytest.mark.skipif(not native.available(), reason="no compiled kernels here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_its_batch(dtype):
    x, weight = numbers(300, 576, dtype=dtype), numbers(576, dtype=dtype)
    together = fused.rms_norm(x, weight, 1e-5), fused.silu_mul(x), fused.gelu_mul(x)
    for row in (0, 1, 150, 299):
        one = x[row, None].clone()
        assert torch.equal(fused.rms_norm(one, weight, 1e-5)[0], together[0][row])
        assert torch.equal(fused.silu_mul(one)[0], together[1][row])
        assert torch.equal(fused.gelu_mul(one)[0], together[2][row])


def test_wrong_shapes_are_explained():
    if not native.available():
        pytest.skip("no compiled kernels here")
    with pytest.raises(RuntimeError, match="weight must be dense"):
        torch.ops.outrider.rms_norm(torch.zeros(2, 32), None, torch.zeros(16), 1e-5)
    q, pools = torch.zeros(2, 3, 64), torch.zeros(2, 10, 3, 64)
    with pytest.raises(RuntimeError, match=r"positions\[1\] is 500, outside 0 .. 499"):
        fused.rope(q, q.clone(), torch.tensor([0, 500]), angles(torch.float32))
    here = torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match=r"slots\[0\] is -1"):
        fused.rope_write(q, q.clone(), q, here, angles(torch.float32), *pools, here - 1)
