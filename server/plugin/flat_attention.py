"""SGLang's attention backend on top of our flattened variable-length attention: one path for every kind of step.

On a CPU it is the only one. On a GPU it runs our Triton kernels (`attention_backends.OURS`): for models that no other
backend supports, and for float32, where speculation can be shown to be exact.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from outrider.kernels.attention import flat_attention
from outrider.kernels.flat_batch import FlatBatch

from .spec_inputs import indptr


class FlatAttentionBackend(AttentionBackend):
    """Extend, decode and ragged verify are the same call; only the lengths differ.

    On a GPU lengths are computed on the device, and the host knows only their bounds. A graph reads the same arrays at
    every replay, `slots` requests; slots after the batch's have no queries.
    """

    supports_ragged_verify_graph = True

    def __init__(self, runner: Any):
        super().__init__()
        self.device = runner.device
        self.needs_cpu_seq_lens = self._on_host
        self.page_table = runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = runner.token_to_kv_pool
        if isinstance(self.token_to_kv_pool, BaseSWAKVPool):
            raise ValueError("our attention has one KV slot a token for all layers; add -- --disable-hybrid-swa-memory")
        self.batch: FlatBatch  # of the forward under way
        self.causal = True  # of the same
        self._of_graphs: FlatBatch | None = None

    def use(self, batch: FlatBatch, *, causal: bool) -> None:
        """Let the next forward run the tokens of this batch, which need not be SGLang's."""
        self.batch, self.causal = batch, causal

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.use(self._batch_of(forward_batch), causal=True)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the arrays of graphs; max_bs: slots of the largest graph."""

        def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=self.page_table.device)

        self._of_graphs = FlatBatch(
            qo_indptr=zeros(max_bs + 1, torch.int32),
            kv_lens=zeros(max_bs, torch.int32),
            rows=zeros(max_bs, torch.int64),
            page_table=self.page_table,
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the arrays before a graph with `batch_size` slots is captured or replayed."""
        live, arrays, slots = self._batch_of(forward_batch), self._of_graphs, forward_batch.batch_size
        if arrays is None:
            raise RuntimeError("no graph can be captured before init_cuda_graph_state")
        requests = live.requests
        arrays.qo_indptr[: requests + 1].copy_(live.qo_indptr)
        arrays.qo_indptr[requests + 1 : slots + 1].copy_(live.qo_indptr[requests:].expand(slots - requests))
        arrays.kv_lens[:requests].copy_(live.kv_lens)
        arrays.kv_lens[requests:slots].zero_()
        arrays.rows[:requests].copy_(live.rows)
        arrays.rows[requests:slots].zero_()
        if in_capture:
            captured = FlatBatch(
                qo_indptr=arrays.qo_indptr[: slots + 1],
                kv_lens=arrays.kv_lens[:slots],
                rows=arrays.rows[:slots],
                page_table=self.page_table,
                most_queries=live.most_queries,
                longest=self.page_table.shape[1],
            )
            self.use(captured, causal=True)

    def shared_read_ends(self, mode: Any) -> SharedReadEnds:
        """Tell SGLang when it may change the page table: our kernels read the table itself until the last layer."""
        verifies_or_decodes = mode.is_decode() or mode.is_target_verify()
        return SharedReadEnds.POST_REPLAY if verifies_or_decodes else SharedReadEnds.UNKNOWN

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _batch_of(self, forward_batch: Any) -> FlatBatch:
        mode = forward_batch.forward_mode
        seq_lens, rows = forward_batch.seq_lens, forward_batch.req_pool_indices
        most_queries = None
        if mode.is_target_verify():
            spec = forward_batch.spec_info
            query_lens = spec.ragged_verify_layout.verify_lens
            seq_lens, rows = seq_lens[: len(query_lens)], rows[: len(query_lens)]  # a graph has as many as its slots
            kv_lens, most_queries = seq_lens + query_lens, spec.draft_token_num
        elif mode.is_decode_or_idle():
            query_lens, kv_lens, most_queries = torch.ones_like(seq_lens), seq_lens, 1
        else:
            query_lens, kv_lens = forward_batch.extend_seq_lens, seq_lens
            most_queries = None if self._on_host else max(forward_batch.extend_seq_lens_cpu)
        return FlatBatch(
            qo_indptr=indptr(query_lens),
            kv_lens=kv_lens.to(torch.int32),
            rows=rows.long(),
            page_table=self.page_table,
            most_queries=None if self._on_host else most_queries,
            longest=None if self._on_host else self.page_table.shape[1],
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, sinks: torch.Tensor | None = None, **_: Any,
    ) -> torch.Tensor:  # fmt: skip
        chunk = getattr(layer, "attention_chunk", None)
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        out = flat_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            self.batch if chunk is None else self.batch.chunked(chunk), scale=layer.scaling, causal=self.causal,
            window=layer.sliding_window_size if layer.sliding_window_size is not None else -1,
            logit_cap=layer.logit_cap, sinks=sinks,
        )  # fmt: skip
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def support_triton(self) -> bool:
        return not self._on_host

    @property
    def _on_host(self) -> bool:
        return torch.device(self.device).type == "cpu"
