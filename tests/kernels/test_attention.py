import dataclasses

import pytest
import torch
from batches import alone, ragged_attention
from margins import EPSILON
from references import reference_attention

from outrider.kernels.attention import Scores, bounded_attention, flat_attention, torch_attention
from outrider.kernels.cpu import native
from outrider.kernels.flat_batch import KV_CHUNK, FlatBatch

SUMS = 832 * EPSILON
"""A score sums 32 numbers, a softmax and an output 400 each."""
RAGGED = ([1, 8, 0, 5, 300, 4, 70], [1, 9, 3, 200, 300, KV_CHUNK, 400])
OPTIONS = [
    {},
    {"causal": False},
    {"window": 0},
    {"window": 37},
    {"causal": False, "window": 3},
    {"logit_cap": 3.0},
    {"sinks": 1.0},
    {"sinks": 60.0, "window": 37},
]


def with_sinks(options, q):
    """The options with a sink for each head of q [N, Hq, D] instead of the largest one."""
    return options | {"sinks": options["sinks"] * torch.linspace(-1, 1, q.shape[1])} if "sinks" in options else options


def plain(q, k, v, batch, **how):
    return torch_attention(q, k, v, batch, Scores(**how))


def bounded(q, k, v, batch, **how):
    """The bounds are not reached, and there is padding."""
    padded = torch.cat([q, torch.full_like(q[:5], torch.nan)])
    batch = dataclasses.replace(batch, most_queries=301, longest=512)
    return bounded_attention(padded, k, v, batch, Scores(**how))[: len(q)]


PATHS = pytest.mark.parametrize("attention", [flat_attention, plain])


@pytest.mark.parametrize("attention", [flat_attention, plain, pytest.param(bounded, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (6, 1)], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, SUMS), (torch.bfloat16, 1e-2)], ids=str)
def test_equals_reference(options, heads, dtype, tolerance, attention):
    q, k, v, batch = ragged_attention(*RAGGED, heads=heads, dims=(32, 48), dtype=dtype)
    options = with_sinks(options, q)
    got = attention(q, k, v, batch, scale=0.2, **options)
    expected = reference_attention(q, k, v, batch, scale=0.2, **options)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@PATHS
@pytest.mark.parametrize("size", [1, 37, 128, 400])
def test_in_chunks_no_query_sees_earlier_chunks(size, attention):
    q, k, v, batch = ragged_attention(*RAGGED, heads=(4, 2), dims=(32, 48))
    output = attention(q, k, v, batch.chunked(size), scale=0.2)
    for token, (request, position) in enumerate(
        zip(batch.requests_of_tokens.tolist(), batch.positions.tolist(), strict=True)
    ):
        slots = batch.page_table[batch.rows[request], position // size * size : position + 1].long()
        scores = torch.einsum("hgd,nhd->hgn", q[token].view(2, 2, -1), k[slots]) * 0.2
        expected = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v[slots]).flatten(0, 1)
        torch.testing.assert_close(output[token], expected, rtol=SUMS, atol=SUMS)


def test_a_sink_takes_its_share_of_the_weights():
    """Softmax with the sink as another column, which is dropped, as in gpt-oss."""
    q, k, v, batch = ragged_attention([1], [3], heads=(1, 1))
    slots = batch.page_table[batch.rows[0], :3].long()
    scores = torch.cat([(k[slots, 0] @ q[0, 0]) * 0.2, torch.tensor([0.7])])
    expected = scores.softmax(0)[:3] @ v[slots, 0]
    output = reference_attention(q, k, v, batch, scale=0.2, sinks=torch.tensor([0.7]))
    torch.testing.assert_close(output[0, 0], expected)


def test_reference_is_plain_attention():
    q, k, v, batch = ragged_attention([6], [6], heads=(2, 2))
    slots = batch.page_table[batch.rows[0], :6].long()
    q_, k_, v_ = (x.transpose(0, 1)[None] for x in (q, k[slots], v[slots]))
    expected = torch.nn.functional.scaled_dot_product_attention(q_, k_, v_, is_causal=True)[0].transpose(0, 1)
    torch.testing.assert_close(reference_attention(q, k, v, batch, scale=64**-0.5), expected)


@PATHS
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 64), ((4, 4), 128)])
def test_float32_result_does_not_depend_on_the_batch(heads, dim, threads, attention):
    q, k, v, batch = ragged_attention([1, 8, 3, 5, 1, 20], [1, 9, 3, 200, 300, 700], heads=heads, dims=(dim, dim))
    torch.set_num_threads(threads)
    together = attention(q, k, v, batch, scale=0.125)
    for token in range(q.shape[0]):
        single = attention(q[token, None], k, v, alone(batch, token), scale=0.125)
        assert torch.equal(single[0], together[token]), f"token {token}"


BATCHES = {
    "ragged": ([1, 8, 3, 5, 1, 20], [1, 9, 3, 200, 300, 700]),
    "a prompt": ([300], [541]),
    # With enough heads, a position's heads are computed together.
    **{f"{n} requests": ([1] * n, [1 + 83 * r % 400 for r in range(n)]) for n in (3, 7, 8, 9, 17)},
}


@pytest.mark.skipif(not native.available(), reason="no compiled kernels here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [-1, 100])
@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
def test_compiled_result_depends_neither_on_the_batch_nor_on_the_threads(lens, window, dtype):
    q, k, v, batch = ragged_attention(*lens, dtype=dtype)
    torch.set_num_threads(1)
    singles = [flat_attention(x[None], k, v, alone(batch, n), scale=0.125, window=window) for n, x in enumerate(q)]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(flat_attention(q, k, v, batch, scale=0.125, window=window), torch.cat(singles)), threads


@PATHS
def test_an_empty_batch(attention):
    q, k, v, _ = ragged_attention([1], [4])
    empty = FlatBatch(torch.tensor([0, 0]).int(), torch.tensor([4]).int(), torch.tensor([0]), torch.zeros(1, 4).int())
    assert attention(q[:0], k, v, empty, scale=1.0).shape == (0, 9, 64)


@PATHS
def test_wrong_shapes_are_explained(attention):
    q, k, v, batch = ragged_attention([2, 3], [5, 3])
    with pytest.raises((ValueError, RuntimeError), match="qo_indptr"):
        attention(q[:4], k, v, batch, scale=1.0)
    with pytest.raises((ValueError, RuntimeError), match="do not group"):
        attention(q[:, :8], k, v, batch, scale=1.0)
