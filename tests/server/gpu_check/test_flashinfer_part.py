"""Part B of `outrider gpu-check` on kernels that are FlashInfer's index by index, and on fa3 as its arguments say."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import fa2
import pytest
import torch

from outrider.kernels.attention import reference_attention
from outrider.kernels.flat_batch import FlatBatch
from outrider.server.errors import UserError
from outrider.server.gpu_check import flashinfer, paged, parts


class PagedWrapper(fa2.PagedWrapper):
    """Pages of several tokens as well: their tokens' places, one by one."""

    def plan(self, qo_indptr, kv_indptr, kv_indices, last_page, heads, kv_heads, head_dim, page_size, **more):
        if page_size > 1:
            held = kv_indptr.diff().tolist()
            lens = [(n - 1) * page_size + last for n, last in zip(held, last_page.tolist(), strict=True)]
            places = (kv_indices[:, None] * page_size + torch.arange(page_size)).split(held)
            kv_indices = torch.cat([own.flatten()[:n] for own, n in zip(places, lens, strict=True)]).int()
            kv_indptr, last_page = torch.tensor([0, *lens]).cumsum(0).int(), torch.ones_like(last_page)
        super().plan(qo_indptr, kv_indptr, kv_indices, last_page, heads, kv_heads, head_dim, 1, **more)

    def forward(self, q, cache, **more):
        return super().forward(q, tuple(pool.flatten(0, 1)[:, None] for pool in cache), **more)


def flash_attn_with_kvcache(
    *, q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window_size,
    softcap,
):  # fmt: skip
    """fa3's, by what its documentation says of these arguments."""
    page = k_cache.shape[1]
    slots = (page_table[:, :, None] * page + torch.arange(page)).flatten(1)
    assert (causal, softcap) == (True, 0)
    assert window_size[1] == (0 if window_size[0] >= 0 else -1)
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    batch = FlatBatch(cu_seqlens_q, cache_seqlens, torch.arange(len(cache_seqlens)), slots.int())
    pools = k_cache.flatten(0, 1).float(), v_cache.flatten(0, 1).float()
    return reference_attention(q.float(), *pools, batch, scale=softmax_scale, window=window_size[0]).to(q.dtype)


DEVICE = SimpleNamespace(
    on=torch.device("cpu"), tiny=True, types=(torch.float32, torch.float16), graph=lambda run: run,
    synchronise=lambda: None, seconds=lambda run, calls=1: 1e-3,
)  # fmt: skip


def measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=PagedWrapper))
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
    attend = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", attend)
    return [one for step in parts.PARTS["B"].steps for one in parts.check("B", step)(DEVICE)]


def test_every_step_of_part_b_is_good(monkeypatch):
    found = measured(monkeypatch)
    assert len(found) > 5
    assert [one for one in found if one.good is False] == []


def test_a_plan_of_other_lengths_is_noticed(monkeypatch):
    plan_verify = flashinfer.plan_verify
    monkeypatch.setattr(flashinfer, "plan_verify", lambda q, s, **more: plan_verify(q, (s - 1).clip(0), **more))
    assert any(one.good is False for one in measured(monkeypatch))


def test_a_page_of_another_is_noticed(monkeypatch):
    made = paged.Paged.__init__

    def other(self, *given):
        made(self, *given)
        self.pages[0], self.listed = self.pages[0].flip(0), self.listed.flip(0)

    monkeypatch.setattr(paged.Paged, "__init__", other)
    found = [one for one in measured(monkeypatch) if one.good is False]
    assert len(found) >= 12
    assert {one.what.partition(",")[0] for one in found} == {"fa3", "FlashInfer"}
    assert all("pages of" in one.what for one in found)


def test_without_a_kernel_that_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(UserError, match="FlashInfer is not installed here"):
        next(iter(parts.check("B", "references")(DEVICE)))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", None)
    with pytest.raises(UserError, match="sglang-kernel, which has fa3, is not installed here"):
        paged.Paged(DEVICE, flashinfer.SMALL[0], torch.float16, 1).fa3()
