"""Our FlashInfer backend, on kernels that repeat FlashInfer's index by index (`fa2.py`)."""

from types import SimpleNamespace

import fa2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_attention import CONTEXT, Paged
from sglang.srt.layers.attention import flashinfer_backend
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from outrider.kernels.ragged import write_cached_slots
from outrider.server.plugin.cuda.flashinfer import RaggedFlashInferBackend
from outrider.server.plugin.cuda.flashinfer_plan import plan_verify, slots_for_tile, tile_rows
from outrider.server.plugin.cuda.tuning import with_lengths

requests = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 300)), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(requests=requests, padding=st.integers(0, 9), more=st.integers(0, 4), window=st.sampled_from([-1, 0, 5, 128]))
def test_every_row_is_in_one_slot_and_lists_its_visible_tokens(requests, padding, more, window):
    query_lens, seq_lens = np.array(requests).T
    tokens, slots = int(query_lens.sum()) + padding, len(requests) + (padding > 0) + more
    plan = plan_verify(query_lens, seq_lens, tokens=tokens, slots=slots, window=window)
    assert plan.qo_indptr.dtype == plan.kv_indptr.dtype == np.int32
    assert (len(plan.qo_indptr), len(plan.kv_indptr), plan.qo_indptr[-1]) == (slots + 1, slots + 1, tokens)
    queries = np.diff(plan.qo_indptr)
    assert (plan.kv_lens >= queries).all()
    assert queries[len(requests) :].tolist() == ([padding] if padding else [0] * (more > 0)) + [0] * (
        slots - len(requests) - 1
    )
    for (length, cached), begin, listed in zip(requests, plan.kv_begins, plan.kv_lens, strict=False):
        assert begin + listed == cached + length
        assert begin == (max(cached - window, 0) if window >= 0 else 0)


@pytest.mark.parametrize(("tokens", "slots"), [(5, 9), (6, 1), (7, 2)])
def test_plans_that_do_not_fit_are_refused(tokens, slots):
    with pytest.raises(ValueError, match="2 requests of 6 tokens do not fit"):
        plan_verify(np.array([2, 4]), np.array([0, 9]), tokens=tokens, slots=slots)


@given(
    captured=st.integers(1, 256), width=st.integers(1, 16), more=st.floats(0, 1),
    group=st.integers(1, 16), head_dim=st.sampled_from([64, 128, 256]),
)  # fmt: skip
def test_tiles_of_a_graph_are_no_larger_than_a_request_fills(captured, width, more, group, head_dim):
    tokens = captured + int(more * captured * (width - 1))
    slots = min(tokens, captured + 1)
    padded = slots_for_tile(tokens, slots, width=width, group=group, head_dim=head_dim)
    assert slots <= padded <= tokens
    assert tile_rows((tokens - padded + 1) * group, head_dim) <= tile_rows(width * group, head_dim)


def test_tiles_stay_unchanged_without_enough_workspace(kernels):
    """Partial results need 377 MB in tiles of 64; the workspace has 64."""
    backend, batch = backend_of(paged_of([1], heads=(16, 4)), -1), SimpleNamespace(batch_size=257)
    batch.spec_info = SimpleNamespace(draft_token_num=16)
    for tokens, more in ((512, True), (4096, False)):
        backend.init_cuda_graph_state(257, 512)
        assert (backend._graph_slots(tokens, batch) > 257) == more


def test_cached_slots_are_the_requests_in_their_order_and_padding_has_slot_0():
    table = torch.arange(60, dtype=torch.int32).view(3, 20)
    out = torch.full((12,), -1, dtype=torch.int32)
    write_cached_slots(out, table, torch.tensor([2, 0]), torch.tensor([3, 0]), torch.tensor([0, 4, 9, 12, 12]))
    assert out.tolist() == [43, 44, 45, 46, *range(5), 0, 0, 0]


@pytest.fixture
def kernels(monkeypatch):
    """SGLang's FlashInfer backend with the kernels of `fa2`."""
    monkeypatch.setattr(flashinfer_backend, "BatchPrefillWithPagedKVCacheWrapper", fa2.PagedWrapper, raising=False)
    for name in ("BatchPrefillWithRaggedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"):
        monkeypatch.setattr(flashinfer_backend, name, lambda *_, **__: None, raising=False)
    deterministic = SimpleNamespace(enable_deterministic_inference=False)
    state = {
        "get_exec": SimpleNamespace(features=SimpleNamespace(enable_mis=False), deterministic=deterministic),
        "get_parallel": SimpleNamespace(attn_tp_size=1, attn_dcp_size=1),
        "get_platform": SimpleNamespace(is_sm100=False),
    }
    for name, value in state.items():
        monkeypatch.setattr(flashinfer_backend, name, lambda value=value: value)
    monkeypatch.setattr(flashinfer_backend, "get_buffer", lambda name, make: torch.empty(64 << 20, dtype=torch.uint8))
    monkeypatch.setattr(flashinfer_backend, "get_cuda_graph_max_batch_size", lambda size: size)
    monkeypatch.setattr(flashinfer_backend.DllmConfig, "from_server_args", lambda _: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=fa2.PROCESSORS)
    )
    fa2.WORKSPACES.clear()


def backend_of(paged, window):
    heads, kv_heads = paged.heads
    config = SimpleNamespace(
        num_attention_heads=heads, get_num_kv_heads=lambda *_: kv_heads, get_max_num_attention_heads=lambda: heads,
        context_len=CONTEXT, is_multimodal=False, is_encoder_decoder=False, head_dim=paged.dim, v_head_dim=paged.dim,
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
    )  # fmt: skip
    runner = paged.runner(
        model_config=config, sliding_window_size=None if window < 0 else window, device="cpu", page_size=1,
        dtype=paged.dtype, kv_cache_dtype=paged.dtype, kv_index_translator=None, server_args=None,
        is_draft_worker=False, prefill_attention_backend_str="flashinfer", decode_attention_backend_str="flashinfer",
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: paged.cache),
    )  # fmt: skip
    return RaggedFlashInferBackend(runner)


def test_a_cache_of_an_unsupported_type_is_refused(kernels, monkeypatch):
    """SGLang's own check covers its own class only."""
    asked = []
    monkeypatch.setattr(
        RaggedFlashInferBackend, "_check_kv_attention_access", lambda self, phase, access: asked.append(phase)
    )
    backend_of(paged_of([5]), -1)
    assert asked == ["prefill", "decode"]


def paged_of(lens, *, heads=(4, 2), window=-1, seed=0):
    return Paged(lens, heads=heads, dim=16, window=window, room=12, seed=seed)


def attend(backend, paged, batch, tokens):
    q, k, v = paged.rows_of(tokens)
    return q, backend.forward(q, k, v, paged.layer, batch)


def assert_right(paged, q, found, query_lens):
    count = sum(query_lens)
    torch.testing.assert_close(found[:count], paged.expected(q, query_lens), atol=2e-5, rtol=2e-5)
    assert found[count:].isfinite().all()


@pytest.mark.parametrize("window", [-1, 0, 7, 200])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)])
def test_outside_graphs(kernels, heads, window):
    paged = paged_of([300, 3, 140, 0, 7], heads=heads, window=window)
    query_lens = [5, 1, 8, 1, 2]
    for padding in (0, 4):
        batch = paged.verify(query_lens, tokens=17 + padding, width=8)
        backend = backend_of(paged, window)
        backend.init_forward_metadata(batch)
        assert_right(paged, *attend(backend, paged, batch, 17 + padding), query_lens)


def test_dummies_of_the_start_are_verified_with_equal_lengths(kernels):
    """SGLang's dummies lack a verification input."""
    paged = paged_of([1] * 3)
    batch = paged.verify([4] * 3, tokens=12, width=4)
    expected, batch.spec_info = batch.spec_info, None
    batch = with_lengths(lambda runner, batch: batch, None, batch)
    assert batch.spec_info.ragged_verify_layout.verify_lens.tolist() == [4, 4, 4]
    layout, wanted = batch.spec_info.ragged_verify_layout, expected.ragged_verify_layout
    assert layout.graph_num_tokens == wanted.graph_num_tokens
    for name in ("verify_lens", "extend_start_loc", "qo_indptr_device"):
        assert torch.equal(getattr(layout, name), getattr(wanted, name))
    backend = backend_of(paged, -1)
    backend.init_forward_metadata(batch)
    assert_right(paged, *attend(backend, paged, batch, 12), [4] * 3)


@pytest.mark.parametrize("window", [-1, 7, 200])
@pytest.mark.parametrize("heads", [(2, 2), (8, 1)])
def test_every_replay_of_a_buckets_graph(kernels, heads, window):
    """A graph is captured for a bucket and replayed with other requests."""
    slots, width = 5, 4
    paged = paged_of([1] * slots, heads=heads, window=window)
    backend = backend_of(paged, window)
    backend.init_cuda_graph_state(slots, 16)
    assert backend.cuda_graph_kv_indices[0].numel() == slots * CONTEXT + 16
    captured = {}
    for tokens, lens in ((16, [4, 3, 3, 3, 3]), (10, [2] * 5), (4, [1] * 4)):
        bucket = paged_of([1] * len(lens), heads=heads, window=window)
        adopt(backend, bucket)
        backend.init_forward_metadata_out_graph(bucket.verify(lens, tokens=tokens, width=width), in_capture=True)
        captured[tokens] = backend.forward_metadata, len(lens)
    for number, (tokens, lens, query_lens) in enumerate(
        [
            (16, [300, 2, 145, 9], [4, 4, 1, 3]),
            (10, [250], [1]),
            (10, [0, 129, 130, 7], [4, 4, 1, 1]),
            (4, [400, 3], [2, 1]),
            (16, [5, 300, 301, 9, 2], [4, 4, 4, 2, 2]),
            (4, [1, 200, 3, 7], [1, 1, 1, 1]),
        ]
    ):
        live = paged_of(lens, heads=heads, window=window, seed=number)
        adopt(backend, live)
        batch = live.verify(query_lens, tokens=tokens, width=width)
        backend.forward_metadata, batch.batch_size = captured[tokens]
        wrappers = backend.forward_metadata.prefill_wrappers
        at = [w._qo_indptr_buf.data_ptr() for w in wrappers], [w._paged_kv_indices_buf.data_ptr() for w in wrappers]
        backend.init_forward_metadata_out_graph(batch)
        assert at == (
            [w._qo_indptr_buf.data_ptr() for w in wrappers], [w._paged_kv_indices_buf.data_ptr() for w in wrappers]
        )  # fmt: skip
        assert_right(live, *attend(backend, live, batch, tokens), query_lens)
    assert max(fa2.WORKSPACES) <= backend._workspace_bytes(slots, 16, torch.device("cpu"))
    tiles = {wrapper._plan_info.tile for metadata, _ in captured.values() for wrapper in metadata.prefill_wrappers}
    assert max(tiles) <= tile_rows(width * heads[0] // heads[1], 16)


def adopt(backend, paged):
    backend.req_to_token_pool, backend.token_to_kv_pool = paged.requests, paged.cache
    backend._page_table = paged.requests.req_to_token


@pytest.mark.parametrize("graph", [False, True])
def test_layers_with_windows_may_have_a_pool_of_their_own(kernels, graph):
    paged, window, query_lens, tokens = paged_of([300, 20, 6], window=9), 9, [3, 1, 4], 12
    keys, values = paged.cache.get_key_buffer(0), paged.cache.get_value_buffer(0)
    places = torch.cat([torch.zeros(1), torch.randperm(len(keys) - 1) + 1]).long()
    paged.cache = SWAKVPool(
        len(keys) - 1, len(keys) - 1, 1, paged.dtype, paged.heads[1], paged.dim, [0], [1], "cpu",
        token_to_kv_pool_class=type(paged.cache), enable_memory_saver=False, enable_alt_stream=False,
    )  # fmt: skip
    paged.cache.register_mapping(places)
    windowed = paged.cache.get_key_buffer(0), paged.cache.get_value_buffer(0)
    for pool, full in zip(windowed, (keys, values), strict=True):
        pool[places] = full
    backend, batch = backend_of(paged, window), paged.verify(query_lens, tokens=tokens, width=4)
    if graph:
        backend.init_cuda_graph_state(4, tokens)
        bucket = paged_of([1] * 4).verify([3] * 4, tokens=tokens, width=4)
        bucket.req_pool_indices = torch.arange(4)
        backend.init_forward_metadata_out_graph(bucket, in_capture=True)
        batch.batch_size = 4
        backend.init_forward_metadata_out_graph(batch)
    else:
        backend.init_forward_metadata(batch)
    q, output = attend(backend, paged, batch, tokens)
    paged.cache = SimpleNamespace(
        get_key_buffer=lambda _: windowed[0][places], get_value_buffer=lambda _: windowed[1][places]
    )
    assert_right(paged, q, output, query_lens)


def test_full_layers_of_a_model_with_windows_see_everything(kernels):
    paged = paged_of([300, 20], window=-1)
    batch = paged.verify([3, 2], tokens=8, width=4)
    backend = backend_of(paged, 9)
    assert backend.use_paged  # prefills, too, are planned with the window
    backend.init_forward_metadata(batch)
    assert_right(paged, *attend(backend, paged, batch, 8), [3, 2])


def test_a_layer_with_another_window_than_was_planned_is_refused(kernels):
    paged = paged_of([30], window=5)
    backend = backend_of(paged, 9)
    batch = paged.verify([1], tokens=1, width=4)
    backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match="has a window of 5, but FlashInfer was planned for the model's 9"):
        attend(backend, paged, batch, 1)


def test_an_upper_bound_of_a_cached_length_is_not_enough(kernels):
    """The kernel counts chunks of its own length, the plan of the bound."""
    paged = paged_of([250])
    backend = backend_of(paged, -1)
    batch = paged.verify([4], tokens=4, width=8)
    backend.init_forward_metadata(batch)
    q, output = attend(backend, paged, batch, 4)
    assert_right(paged, q, output, [4])
    wrapper = backend.prefill_wrappers_verify[0]
    exact, bounds = wrapper._paged_kv_indptr_buf, torch.tensor([0, 382, 382], dtype=torch.int32)
    wrapper.plan(
        wrapper._qo_indptr_buf, bounds, wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf, 4, 2, 16, 1,
        causal=True, q_data_type=paged.dtype, kv_data_type=paged.dtype,
    )  # fmt: skip
    wrapper._paged_kv_indptr_buf = exact
    wrong = backend.forward(q, None, None, paged.layer, batch)
    assert not torch.allclose(wrong, output, atol=1e-3)
