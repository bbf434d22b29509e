"""Flat attention against torch on ragged batches over scattered slots, where nobody's slots hold NaN."""

import pytest
import torch
from batches import alone, ragged_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.attention import torch_attention
from outrider.kernels.cuda import attention

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def attend(q, k_pool, v_pool, batch, *, most=None, scale=0.11, causal=True, window=-1, logit_cap=0.0):
    """The operator, as `flat_attention` calls it."""
    arrays = batch.qo_indptr, batch.kv_lens, batch.rows, batch.page_table
    most = most or max(1, batch.max_q_len)
    return attention.attention(q, k_pool, v_pool, *arrays, most, scale, causal, window, logit_cap)


@settings(max_examples=24)
@given(
    lens=st.sampled_from([[(1, 1)], [(1, 70), (0, 9), (5, 5)], [(16, 40), (1, 130)], [(2, 300)], [(0, 3), (0, 0)]]),
    group=st.integers(1, 8),
    dim=st.sampled_from([64, 128]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    causal=st.booleans(),
    window=st.sampled_from([-1, 0, 3, 100]),
    logit_cap=st.sampled_from([0.0, 5.0]),
    least=st.sampled_from([64, 512]),
)
def test_equals_torch(lens, group, dim, dtype, causal, window, logit_cap, least):
    q_lens, kv_lens = zip(*lens, strict=True)
    q, k_pool, v_pool, batch = ragged_attention(q_lens, kv_lens, heads=(2 * group, 2), dims=(dim, dim), dtype=dtype)
    keywords = {"scale": dim**-0.5, "causal": causal, "window": window, "logit_cap": logit_cap}
    exact = [x.float() for x in (q, k_pool, v_pool)]
    expected = torch_attention(*exact, batch, **keywords)
    padded = torch.cat([q, q.new_full((3, *q.shape[1:]), torch.nan)])  # a bucket's padding, which nobody owns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "LEAST", least)  # else short contexts are not split
        found = attend(padded, k_pool, v_pool, batch, **keywords)
    assert found.dtype == dtype
    torch.testing.assert_close(found[: len(q)].float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not found[len(q) :].any()


def test_three_hundred_requests():
    q, k_pool, v_pool, batch = ragged_attention([1] * 300, [2] * 300, heads=(2, 1))
    expected = torch_attention(q, k_pool, v_pool, batch, scale=0.11)
    torch.testing.assert_close(attend(q, k_pool, v_pool, batch), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("window", [-1, 20])
def test_in_float32_a_query_has_the_same_bits_alone_and_beside_others(window):
    q, k_pool, v_pool, batch = ragged_attention([4, 16], [90, 200], heads=(4, 2))
    together = attend(q, k_pool, v_pool, batch, window=window)
    for token in (0, 4, 12):  # the first of a tile, since numpy's products depend on a row's place
        one = attend(q[token, None], k_pool, v_pool, alone(batch, token), window=window)
        assert torch.equal(one[0], together[token])
