"""SGLang's backend `outrider` as on a GPU, with interpreted Triton kernels."""

import pytest
import torch
from paged_attention import Paged
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from outrider.kernels.cpu import native
from outrider.kernels.cuda import attention
from outrider.kernels.cuda import native as cuda
from outrider.server.plugin.flat_attention import FlatAttentionBackend

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
SHAPES = [  # heads, numbers of a head, type, window, cap
    ((1, 1), 64, torch.float32, -1, 0.0),
    ((8, 2), 128, torch.float16, -1, 0.0),
    ((6, 2), 64, torch.float32, 9, 0.0),
    ((8, 1), 64, torch.float16, 20, 0.0),
    ((4, 2), 128, torch.float32, -1, 5.0),
    ((5, 1), 64, torch.float16, 0, 5.0),
]


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the Triton kernels for tensors of the CPU."""
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(cuda, "fits", lambda *_: cuda.available())
    monkeypatch.setattr(attention, "LEAST", 64)  # splits short contexts too


def backend_of(paged: Paged) -> FlatAttentionBackend:
    return FlatAttentionBackend(paged.runner(device="cuda"))


def paged_of(shape, lens, **more):
    heads, dim, dtype, window, cap = shape
    return Paged(lens, heads=heads, dim=dim, dtype=dtype, window=window, cap=cap, **more)


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("shape", SHAPES)
def test_extend_after_a_prefix_decode_and_verify(shape):
    dtype = shape[2]
    for lens, query_lens, kind in (
        ([0, 33, 100], [9, 1, 3], "extend"),
        ([3, 70], [1, 1], "decode"),
        ([70, 0, 130], [1, 1, 3], "verify"),
    ):
        paged = paged_of(shape, lens)
        bucket = sum(query_lens) + (4 if kind == "verify" else 0)
        if kind == "verify":
            batch = paged.verify(query_lens, tokens=bucket, width=4)
        else:
            batch = paged.extend(query_lens) if kind == "extend" else paged.decode()
        backend = backend_of(paged)
        backend.init_forward_metadata(batch)
        q, k, v = paged.rows_of(bucket)
        output = backend.forward(q, k, v, paged.layer, batch)
        assert_near(output[: sum(query_lens)], paged.expected(q, query_lens), dtype)
        assert not output[sum(query_lens) :].any()


@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_a_graph_reads_the_arrays_of_every_replay(shape):
    dtype, slots, tokens, width = shape[2], 5, 10, 3
    paged = paged_of(shape, [2] * slots)
    backend = backend_of(paged)
    backend.init_cuda_graph_state(slots + 3, 64)
    captured = paged.verify([2] * slots, tokens=tokens, width=width)
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    arrays = backend.batch
    assert (arrays.requests, arrays.most_queries) == (slots, width)
    for lens, query_lens in (([70, 1, 9], [3, 1, 2]), ([5], [1]), ([3, 0, 80, 7], [3, 1, 1, 2])):
        live = paged_of(shape, lens, seed=len(lens))
        backend.page_table.copy_(torch.nn.functional.pad(live.requests.req_to_token, (0, 0, 0, slots - len(lens))))
        backend.token_to_kv_pool = live.cache
        batch = live.verify(query_lens, tokens=tokens, width=width)
        padded = slots - len(lens)
        batch.batch_size = slots  # as in a graph's replay
        batch.seq_lens = torch.nn.functional.pad(batch.seq_lens, (0, padded), value=1)
        batch.req_pool_indices = torch.nn.functional.pad(batch.req_pool_indices, (0, padded))
        backend.init_forward_metadata_out_graph(batch)
        assert backend.batch is arrays
        q, k, v = live.rows_of(tokens)
        output = backend.forward(q, k, v, live.layer, batch)
        assert_near(output[: sum(query_lens)], live.expected(q, query_lens), dtype)
        assert not output[sum(query_lens) :].any()


def test_sglang_changes_the_page_table_only_when_a_graph_has_ended():
    """A running graph reads the current table: an event within the graph is too early."""
    paged = paged_of(SHAPES[1], [70, 9])
    backend = backend_of(paged)
    backend.init_cuda_graph_state(4, 16)
    batch = paged.verify([2, 1], tokens=3, width=3)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    rows = paged.rows_of(3)
    before = backend.forward(*rows, paged.layer, batch)
    table = paged.requests.req_to_token[paged.rows[0], :70]
    table.copy_(table.flip(0)[:1].expand(70).clone())
    reads_live = not torch.equal(backend.forward(*rows, paged.layer, batch), before)
    for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DECODE):
        assert (backend.shared_read_ends(mode) is SharedReadEnds.POST_REPLAY) == reads_live
    assert backend.shared_read_ends(ForwardMode.EXTEND) is SharedReadEnds.UNKNOWN  # prefills run without graphs


@pytest.mark.parametrize("kind", ["extend", "decode"])
def test_equals_sglangs_own_torch(kind):
    paged = Paged([20, 0, 75], heads=(4, 2), dim=64)
    batch = paged.extend([3, 9, 1]) if kind == "extend" else paged.decode()
    q, k, v = paged.rows_of(len(batch.out_cache_loc))
    outputs = []
    for backend in (backend_of(paged), TorchNativeAttnBackend(paged.runner(device="cpu"))):
        backend.init_forward_metadata(batch)
        outputs.append(backend.forward(q, k, v, paged.layer, batch))
    torch.testing.assert_close(outputs[0], outputs[1], atol=2e-5, rtol=2e-5)
