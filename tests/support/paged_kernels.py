"""fa3 by its arguments, on a CPU."""

import torch
from references import reference_attention

from outrider.kernels.flat_batch import FlatBatch


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
