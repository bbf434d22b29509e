"""Padding rows in SGLang's fa3 backend without a graph, on a kernel that skips them."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import paged_kernels
import pytest
import torch
from paged_attention import CONTEXT, Paged
from sglang.srt.configs.model_config import AttentionArch

from outrider.server.plugin.cuda.padding import zeroed

HEADS, DIM, WIDTH = (4, 2), 16, 4


def kernel(q: torch.Tensor, cu_seqlens_q: torch.Tensor, **how: Any) -> torch.Tensor:
    """fa3, from its documentation; results hold NaN until written."""
    taken = "k_cache", "v_cache", "page_table", "cache_seqlens", "max_seqlen_q", "softmax_scale", "causal"
    how = {name: how[name] for name in (*taken, "window_size", "softcap")}
    rows = int(cu_seqlens_q[-1])
    out = torch.full_like(q, torch.nan)
    out[:rows] = paged_kernels.flash_attn_with_kvcache(q=q[:rows], cu_seqlens_q=cu_seqlens_q, **how)
    return out


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch) -> Any:
    kernels = ModuleType("sgl_kernel.flash_attn")
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata"):
        setattr(kernels, name, kernel)
    package = ModuleType("sgl_kernel")
    package.merge_state_v2, package.flash_attn = None, kernels
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", kernels)
    from sglang.srt.layers.attention import flashattention_backend as module

    deterministic = SimpleNamespace(enable_deterministic_inference=False)
    state = {
        "get_parallel": {"attn_cp_size": 1, "attn_tp_size": 1, "enable_prefill_cp": False, "attn_dp_enabled": False},
        "get_spec": {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": WIDTH},
        "get_exec": {"deterministic": deterministic},
        "get_model": {"is_embedding": False},
    }
    for name, values in state.items():
        monkeypatch.setattr(module, name, lambda values=values: SimpleNamespace(**values))
    monkeypatch.setattr(module, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(module, "flash_attn_with_kvcache", kernel)

    def make(paged: Paged) -> Any:
        config = SimpleNamespace(
            is_encoder_decoder=False, context_len=CONTEXT, attention_arch=AttentionArch.MHA, head_dim=DIM,
            is_local_attention_model=False, hf_text_config=SimpleNamespace(num_attention_heads=HEADS[0]),
            get_num_kv_heads=lambda _: HEADS[1],
        )  # fmt: skip
        return module.FlashAttentionBackend(
            paged.runner(
                model_config=config, sliding_window_size=None, device="cpu", page_size=1, kv_cache_dtype=paged.dtype,
                kv_cache_dtype_str="auto", is_draft_worker=False,
                kv_index_translator=SimpleNamespace(is_translating=False, reads_are_translated=False),
            )
        )  # fmt: skip

    return make


def attend(backend: Any, paged: Paged, batch: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    backend.init_forward_metadata(batch)
    q, k, v = paged.rows_of(tokens)
    return q, backend.forward(q, k, v, paged.layer, batch)


def test_they_are_uninitialised_in_sglang_and_zero_in_ours(fa3: Any) -> None:
    query_lens, tokens = [3, 1, 4], 11
    for made, finite in ((fa3, False), (lambda paged: zeroed(fa3, paged), True)):
        paged = Paged([40, 0, 7], heads=HEADS, dim=DIM)
        q, output = attend(made(paged), paged, paged.verify(query_lens, tokens=tokens, width=WIDTH), tokens)
        torch.testing.assert_close(output[:8], paged.expected(q, query_lens), atol=2e-5, rtol=2e-5)
        assert bool(output[8:].isfinite().all()) == finite
        assert bool((output[8:] == 0).all()) == finite


def test_a_full_bucket_and_a_prefill_are_left_as_they_are(fa3: Any) -> None:
    paged = Paged([40, 0, 7], heads=HEADS, dim=DIM)
    backend = zeroed(fa3, paged)
    q, output = attend(backend, paged, paged.verify([3, 1, 4], tokens=8, width=WIDTH), 8)
    torch.testing.assert_close(output, paged.expected(q, [3, 1, 4]), atol=2e-5, rtol=2e-5)
    paged = Paged([40, 0, 7], heads=HEADS, dim=DIM)
    backend = zeroed(fa3, paged)
    attend(backend, paged, paged.verify([1, 1, 1], tokens=5, width=WIDTH), 5)
    backend.token_to_kv_pool, backend.req_to_token_pool = paged.cache, paged.requests
    q, output = attend(backend, paged, paged.extend([5, 2, 6]), 13)
    torch.testing.assert_close(output, paged.expected(q, [5, 2, 6]), atol=2e-5, rtol=2e-5)


def test_no_operation_is_added_to_a_graph() -> None:
    out = torch.ones(4, 2)
    backend = SimpleNamespace(
        init_forward_metadata=lambda _: None, init_forward_metadata_out_graph=lambda *_, **__: None,
        forward_extend=lambda *_: out,
    )  # fmt: skip
    zeroed(lambda _: backend, None)
    paged = Paged([4], heads=HEADS, dim=DIM)
    backend.init_forward_metadata(paged.verify([1], tokens=4, width=WIDTH))
    assert backend.forward_extend().tolist() == [[1, 1]] + [[0, 0]] * 3
    out.fill_(1)
    backend.init_forward_metadata_out_graph(None, in_capture=True)
    assert backend.forward_extend().tolist() == [[1, 1]] * 4
