"""FlashInfer's wrapper over larger pages, and fa3 by its arguments, on a CPU."""

import fa2
import torch
from references import reference_attention

from outrider.kernels.flat_batch import FlatBatch


class PagedWrapper(fa2.PagedWrapper):
    """Takes larger pages too, as the places of their tokens."""

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
    """fa3, from its documentation."""
    page = k_cache.shape[1]
    slots = (page_table[:, :, None] * page + torch.arange(page)).flatten(1)
    assert (causal, softcap) == (True, 0)
    assert window_size[1] == (0 if window_size[0] >= 0 else -1)
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    batch = FlatBatch(cu_seqlens_q, cache_seqlens, torch.arange(len(cache_seqlens)), slots.int())
    pools = k_cache.flatten(0, 1).float(), v_cache.flatten(0, 1).float()
    return reference_attention(q.float(), *pools, batch, scale=softmax_scale, window=window_size[0]).to(q.dtype)
