"""A draft layer's norms, rotation and cache writes by Triton, against torch."""

from types import SimpleNamespace

import torch
from gpu_device import TOLERANCE, TYPES, examples, moved, row_error
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.block.layers import DraftLayer, Rotary
from outrider.kernels.cuda import rotated

POSITIONS, SLOTS, KV_HEADS = 40, 30, 2


def layer_of(dim, heads, normed, dtype, seed):
    torch.manual_seed(seed)
    config = SimpleNamespace(
        hidden_size=24, num_heads=heads, num_kv_heads=KV_HEADS, head_dim=dim, rms_norm_eps=1e-5, qk_norm=normed,
        intermediate_size=8, convolution=None, max_positions=POSITIONS, rope=None, rope_theta=100.0,
    )  # fmt: skip
    layer = DraftLayer(config).requires_grad_(False)
    for norm in (layer.q_norm, layer.k_norm) if normed else ():
        norm.weight.uniform_(0.5, 1.5)
    return layer.to(dtype), Rotary(config).to(dtype)


@examples(6)
@given(
    dim=st.sampled_from([8, 12, 64]),
    heads=st.sampled_from([4, 6]),
    rows=st.sampled_from([1, 5, 17]),
    context=st.booleans(),
    normed=st.booleans(),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 2**31),
)
def test_queries_keys_and_values_as_by_torch(dim, heads, rows, context, normed, dtype, seed):
    layer, rotary = layer_of(dim, heads, normed, dtype, seed)
    x, positions = torch.randn(rows, 24, dtype=dtype), torch.randint(POSITIONS, (rows,))
    slots, pool = torch.randperm(SLOTS)[:rows], torch.randn(2, SLOTS, KV_HEADS, dim, dtype=dtype)
    exact = layer_of(dim, heads, normed, torch.float32, seed)[0]
    exact.load_state_dict(layer.state_dict())
    rope = rotary.float().rows(positions)
    if context:
        projected, q = layer.projected_context(x), None
        k, v = exact.context_kv(x.float(), rope)
    else:
        projected = layer.projected(x)
        q, k, v = exact.block_qkv(x.float(), rope)
    weights = [getattr(norm, "weight", None) for norm in (layer.q_norm, layer.k_norm)]
    given = moved((projected, rotary.to(dtype).table, positions, slots, *weights, 1e-5, *pool.clone()))
    made = rotated.rotate_and_store(*given)
    keys, values = (each.cpu() for each in given[-2:])
    assert made.shape == (rows, 0 if context else heads, dim)
    for found, expected in ((keys[slots], k), (values[slots], v), *([] if q is None else [(made, q)])):
        assert row_error(found.flatten(1), expected.flatten(1)) <= 2 * TOLERANCE[dtype]
    others = torch.ones(SLOTS, dtype=torch.bool).index_fill(0, slots, False)
    assert torch.equal(keys[others], pool[0][others])
    assert torch.equal(values[others], pool[1][others])


def test_a_position_beyond_the_table_is_turned_as_the_last():
    layer, rotary = layer_of(8, 4, True, torch.float32, 0)
    projected, slots = layer.projected(torch.randn(2, 24)), torch.tensor([1, 2])
    pool = torch.zeros(2, SLOTS, KV_HEADS, 8)
    weights = layer.q_norm.weight, layer.k_norm.weight
    results = [
        rotated.rotate_and_store(*moved((projected, rotary.table, torch.tensor(at), slots, *weights, 1e-5, *pool)))
        for at in ([POSITIONS - 1, 3], [POSITIONS + 7, 3])
    ]
    assert torch.equal(*results)
