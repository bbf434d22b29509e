"""Flat attention against torch on ragged batches; unused slots hold NaN."""

import pytest
import torch
from batches import alone, ragged_attention
from gpu_device import INTERPRETED, TOLERANCE, TYPES, examples, moved, row_error
from hypothesis import given
from hypothesis import strategies as st

from outrider.kernels.attention import Scores, torch_attention
from outrider.kernels.cuda import attention


def attend(q, k_pool, v_pool, batch, *, most=None, scale=0.11, causal=True, window=-1, logit_cap=0.0):
    arrays = moved((q, k_pool, v_pool, batch.qo_indptr, batch.kv_lens, batch.rows, batch.page_table))
    most = most or max(1, batch.max_q_len)
    return attention.attention(*arrays, most, scale, causal, window, logit_cap).cpu()


def check(lens, *, group=4, kv_heads=2, dim=128, dtype=torch.float32, least=attention.LEAST, **how):
    """lens: pairs of queries and cached tokens, queries included. least: positions of a split."""
    q_lens, kv_lens = zip(*lens, strict=True)
    q, k_pool, v_pool, batch = ragged_attention(
        q_lens, kv_lens, heads=(group * kv_heads, kv_heads), dims=(dim, dim), dtype=dtype
    )
    how = {"scale": dim**-0.5} | how
    expected = torch_attention(q.float(), k_pool.float(), v_pool.float(), batch, Scores(**how))
    padded = torch.cat([q, q.new_full((3, *q.shape[1:]), torch.nan)])  # a bucket's padding
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "LEAST", least)  # splits short contexts too
        output = attend(padded, k_pool, v_pool, batch, **how)
    assert output.dtype == dtype
    assert len(q) == 0 or row_error(output[: len(q)], expected) <= TOLERANCE[dtype]
    assert not output[len(q) :].any()


@examples(24)
@given(
    lens=st.sampled_from([[(1, 1)], [(1, 70), (0, 9), (5, 5)], [(16, 40), (1, 130)], [(2, 300)], [(0, 3), (0, 0)]]),
    group=st.integers(1, 8),
    dim=st.sampled_from([16, 32, 64, 80, 96, 128, 256]),
    dtype=st.sampled_from(TYPES),
    causal=st.booleans(),
    window=st.sampled_from([-1, 0, 3, 100]),
    logit_cap=st.sampled_from([0.0, 5.0]),
    least=st.sampled_from([64, 512]),
)
def test_equals_torch(lens, **how):
    check(lens, **how)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dim", [48, 192, 512])
def test_heads_of_other_sizes(dim, dtype):
    check([(3, 140), (1, 20)], group=8, kv_heads=1, dim=dim, dtype=dtype, least=64)


MIXED = [(1, 2900), (8, 700), (3, 64), (16, 1500), (0, 33), (1, 4096), (8, 8), (2, 512)]
LARGE = {
    "a long draft": ([(16, 2900)], {}),
    "a step": (MIXED, {}),
    "one KV head each": (MIXED, {"group": 1}),
    "8 heads a KV head": (MIXED, {"group": 8, "dim": 64}),
    "window 0": (MIXED, {"window": 0}),
    "window 1000": (MIXED, {"window": 1000}),
    "heads of 96": (MIXED, {"dim": 96}),
    "heads of 256": (MIXED, {"dim": 256}),
    "heads of 512": (MIXED, {"dim": 512, "group": 2}),
    "capped": (MIXED, {"logit_cap": 30.0}),
    "draft blocks": ([(8, n) for q, n in MIXED if q], {"causal": False}),
    "pieces of prompts": ([(500, 900), (1, 2000), (129, 129)], {}),
    "300 requests": ([(1, 400), (8, 8), (0, 50)] * 100, {}),
}


@pytest.mark.skipif(INTERPRETED, reason="takes Triton's interpreter too long")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", LARGE)
def test_equals_torch_on_batches_of_a_server(case, dtype):
    lens, how = LARGE[case]
    check(lens, dtype=dtype, **how)


def test_three_hundred_requests():
    check([(1, 2)] * 300, group=2, kv_heads=1, dim=64)


@pytest.mark.parametrize("window", [-1, 20])
def test_in_float32_a_query_has_the_same_bits_alone_and_in_a_batch(window):
    lens = ([4, 16], [90, 200]) if INTERPRETED else ([4, 16, 1, 8], [900, 2000, 3000, 64])
    q, k_pool, v_pool, batch = ragged_attention(*lens, heads=(4, 2))
    together = attend(q, k_pool, v_pool, batch, window=window)
    # Interpreted, only the first of a tile: numpy's products depend on a row's place.
    for token in (0, 4, 12) if INTERPRETED else range(len(q)):
        one = attend(q[token, None], k_pool, v_pool, alone(batch, token), window=window)
        assert torch.equal(one[0], together[token])
