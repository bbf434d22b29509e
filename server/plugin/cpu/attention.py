"""SGLang's attention backend on top of our flattened variable-length attention: one path for every kind of step."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from outrider.kernels.attention import flat_attention
from outrider.kernels.flat_batch import FlatBatch
from outrider.server.plugin.decode.spec_inputs import indptr


class FlatAttentionBackend(AttentionBackend):
    """Extend, decode and ragged verify are the same call; only the lengths differ."""

    def __init__(self, runner: Any):
        super().__init__()
        self.device = runner.device
        self.page_table = runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.batch: FlatBatch  # of the forward under way
        self.causal = True  # of the same

    def use(self, batch: FlatBatch, *, causal: bool) -> None:
        """Make the next forward's tokens those of a batch, which need not be SGLang's."""
        self.batch, self.causal = batch, causal

    def init_forward_metadata(self, forward_batch: Any) -> None:
        mode = forward_batch.forward_mode
        seq_lens = forward_batch.seq_lens
        if mode.is_target_verify():
            query_lens = forward_batch.spec_info.query_lens
            kv_lens = seq_lens + query_lens
        elif mode.is_decode_or_idle():
            query_lens = torch.ones_like(seq_lens)
            kv_lens = seq_lens
        else:
            query_lens = forward_batch.extend_seq_lens
            kv_lens = seq_lens
        batch = FlatBatch(
            qo_indptr=indptr(query_lens),
            kv_lens=kv_lens.to(torch.int32),
            rows=forward_batch.req_pool_indices.long(),
            page_table=self.page_table,
        )
        self.use(batch, causal=True)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> torch.Tensor:
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        out = flat_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            self.batch,
            scale=layer.scaling,
            causal=self.causal,
            window=layer.sliding_window_size if layer.sliding_window_size is not None else -1,
            logit_cap=layer.logit_cap,
        )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def support_triton(self) -> bool:
        return False
