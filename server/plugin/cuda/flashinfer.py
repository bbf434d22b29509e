"""Extends SGLang's FlashInfer backend to verify requests of different lengths, inside and outside CUDA graphs.

SGLang's own backend ignores the window in a verification and refuses ragged ones in graphs. All code but verification
is SGLang's.

FlashInfer plans on the host, so a step waits once, until the device knows how many tokens each request verifies. The
cached lengths arrive with them: see `flashinfer_plan` for why they must be exact.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention import flashinfer_backend
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend, PrefillMetadata, WrapperDispatch
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, resolve_ragged_verify_layout

from outrider.kernels.ragged import write_cached_slots
from outrider.kernels.upload import upload

from .flashinfer_plan import PAGE, FlashInferPlan, plan_verify, slots_for_tile

PLAN_BYTES = 1 << 20
"""Bytes of a bucket's plan, on the device and pinned on the host; FlashInfer's default is 8 MB. A plan takes 17 for
every row and slot, and no bucket has 60,000 of them."""


class RaggedFlashInferBackend(FlashInferAttnBackend):
    """Wrappers of FlashInfer's fa2 kernels: one set for each bucket's graph, SGLang's own set outside graphs."""

    supports_ragged_verify_graph = True
    needs_cpu_seq_lens = False  # verification reads them itself, in its one wait

    def __init__(self, runner: Any, **others: Any):
        super().__init__(runner, **others)
        # SGLang checks the cache's type for its own class alone.
        for phase, name in (("prefill", "prefill_attention_backend_str"), ("decode", "decode_attention_backend_str")):
            if getattr(runner, name) == "flashinfer":
                self._check_kv_attention_access(phase, getattr(self, f"{phase}_kv_access"))
        self._page_table = runner.req_to_token_pool.req_to_token
        self._buckets: dict[int, tuple[list[Any], int]] = {}  # wrappers and slots by tokens
        self._window = -1
        if self.dispatch_reason is WrapperDispatch.SLIDING_WINDOW:
            self._window = int(runner.sliding_window_size)
            self.use_paged = True  # SGLang plans prefills that use the other wrapper without the window

    # -- called by SGLang ---------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a forward outside graphs."""
        layout = _verified(forward_batch)
        if layout is None:
            super().init_forward_metadata(forward_batch)
            return
        self._plan_all(self.prefill_wrappers_verify, forward_batch, layout, slots=layout.bs + 1)
        slots = self._windowed_slots(forward_batch.out_cache_loc) if self.use_sliding_window_kv_pool else None
        self.forward_metadata = PrefillMetadata(
            self.prefill_wrappers_verify, use_ragged=False, extend_no_prefix=False, swa_out_cache_loc=slots
        )

    def init_cuda_graph_state(
        self, max_bs: int, max_num_tokens: int, kv_indices_buf: torch.Tensor | None = None
    ) -> None:
        """Allocate buffers. max_bs: slots of the largest graph; each lists the positions of a context at most."""
        device, positions = self.workspace_buffer.device, max_bs * self.max_context_len + max_num_tokens
        first = kv_indices_buf if kv_indices_buf is not None else _zeros(positions, device)
        self.cuda_graph_kv_indices = [first] + [_zeros(positions, device) for _ in range(self.num_wrappers - 1)]
        self.cuda_graph_qo_indptr = [torch.zeros_like(indptr) for indptr in self.kv_indptr]
        self.cuda_graph_swa_out_cache_loc: Any = None
        if self.use_sliding_window_kv_pool:
            self.cuda_graph_swa_out_cache_loc = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._workspace = self.workspace_buffer
        needed = self._workspace_bytes(max_bs, max_num_tokens, device)
        if needed > self._workspace.numel():
            self._workspace = torch.empty(needed, dtype=torch.uint8, device=device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan before a graph is captured or replayed."""
        layout = _verified(forward_batch)
        if layout is None:
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
            return
        tokens = layout.graph_num_tokens
        written = None
        if self.use_sliding_window_kv_pool:
            written = self.cuda_graph_swa_out_cache_loc[:tokens]
            written.copy_(self._windowed_slots(forward_batch.out_cache_loc[:tokens]))
        if in_capture:
            slots = self._graph_slots(tokens, forward_batch)
            wrappers = [self._make_wrapper(index, slots) for index in range(self.num_wrappers)]
            self._buckets[tokens] = wrappers, slots
            self.forward_metadata = PrefillMetadata(
                wrappers, use_ragged=False, extend_no_prefix=False, swa_out_cache_loc=written
            )
        wrappers, slots = self._buckets[tokens]
        self._plan_all(wrappers, forward_batch, layout, slots)
        if in_capture:  # kernels are chosen: SGLang's faster plan then copies no lengths from the device
            for wrapper in wrappers:
                wrapper.begin_forward = partial(flashinfer_backend.fast_prefill_plan, wrapper)

    def _get_wrapper_idx(self, layer: Any) -> int:
        index = int(super()._get_wrapper_idx(layer))
        if self._window >= 0 and index == 0 and layer.sliding_window_size != self._window:
            raise ValueError(
                f"layer {layer.layer_id} has a window of {layer.sliding_window_size}, but FlashInfer was planned for "
                f"the model's {self._window}; use --attention-backend outrider"
            )
        return index

    # -- plans --------------------------------------------------------------------------------------------------

    def _plan_all(self, wrappers: list[Any], forward_batch: Any, layout: RaggedVerifyLayout, slots: int) -> None:
        """Plan after a wait for the lengths; earlier plans have been copied to the device by then."""
        requests = layout.bs
        lens = layout.verify_lens.long(), forward_batch.seq_lens[:requests].long()
        query_lens, seq_lens = torch.stack(lens).cpu().numpy()
        rows = forward_batch.req_pool_indices[:requests].long()
        for index, wrapper in enumerate(wrappers):
            window = self._window if index == 0 else -1
            plan = plan_verify(query_lens, seq_lens, tokens=layout.graph_num_tokens, slots=slots, window=window)
            self._begin(wrapper, plan, self._cached_slots(wrapper, index, plan, rows), window)

    def _cached_slots(self, wrapper: Any, index: int, plan: FlashInferPlan, rows: torch.Tensor) -> torch.Tensor:
        """Return cached slots [plan.kv_indptr[-1]] int32, in the wrapper's own buffer where a graph reads them."""
        device, total = rows.device, int(plan.kv_indptr[-1])
        if wrapper.is_cuda_graph_enabled:
            found = self.cuda_graph_kv_indices[index][:total]
        else:
            found = torch.empty(total, dtype=torch.int32, device=device)
        write_cached_slots(
            found, self._page_table, rows, upload(plan.kv_begins, device), upload(plan.kv_indptr, device)
        )
        if index == 0 and self.use_sliding_window_kv_pool:
            found.copy_(self._windowed_slots(found))
        return found

    def _begin(self, wrapper: Any, plan: FlashInferPlan, cached_slots: torch.Tensor, window: int) -> None:
        """Plan. Split-KV stays on: without it, blocks of a graph that a batch does not need read out of bounds."""
        heads, slots = self.indices_updater_prefill, len(plan.kv_lens)
        on_host = [plan.qo_indptr, plan.kv_indptr, np.ones(slots, dtype=np.int32)]
        qo_indptr, kv_indptr, last_page = (self._staged(numbers) for numbers in on_host)
        known: dict[str, Any] = {}
        if isinstance(wrapper.begin_forward, partial):
            known = {
                "qo_indptr_host": qo_indptr,
                "kv_indptr_host": kv_indptr,
                "kv_lens_host": torch.from_numpy(plan.kv_lens),
                "max_q_len": int(np.diff(plan.qo_indptr).max()),
                "max_kv_len": int(plan.kv_lens.max()),
            }
        wrapper.begin_forward(
            qo_indptr,
            kv_indptr,
            cached_slots,
            last_page,
            heads.num_qo_heads,
            heads.num_kv_heads,
            heads.head_dim,
            PAGE,
            causal=True,
            window_left=window,
            q_data_type=heads.q_data_type,
            kv_data_type=heads.data_type,
            **known,
        )

    def _staged(self, numbers: np.ndarray) -> torch.Tensor:
        """Return the numbers as a host tensor that a GPU copies without a wait."""
        found = torch.from_numpy(numbers)
        return found if self.workspace_buffer.is_cpu else found.pin_memory()

    def _make_wrapper(self, index: int, slots: int) -> Any:
        device = self._workspace.device
        wrapper = flashinfer_backend.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            backend=self.prefill_backend,
            qo_indptr_buf=_zeros(slots + 1, device),
            paged_kv_indptr_buf=_zeros(slots + 1, device),
            paged_kv_indices_buf=self.cuda_graph_kv_indices[index],
            paged_kv_last_page_len_buf=_zeros(slots, device),
        )
        wrapper.reset_workspace_buffer(self._workspace, torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device))
        return wrapper

    def _graph_slots(self, tokens: int, forward_batch: Any) -> int:
        """Return the slots of a graph's plans: SGLang's, or more if that gives smaller tiles and fits in memory."""
        heads, slots = self.indices_updater_prefill, int(forward_batch.batch_size)
        more = slots_for_tile(
            tokens,
            slots,
            width=forward_batch.spec_info.draft_token_num,
            group=heads.num_qo_heads // heads.num_kv_heads,
            head_dim=heads.head_dim,
        )
        needed = self._workspace_bytes(more, tokens, self._workspace.device)
        return more if needed <= self._workspace.numel() else slots

    def _workspace_bytes(self, slots: int, tokens: int, device: torch.device) -> int:
        """Return bytes for a bucket's partial results. FlashInfer reserves them for packed rows, too many by the factor
        of grouped heads (its pull request 5177)."""
        heads = self.indices_updater_prefill
        return int(
            self._full_cg_prefill_workspace_bytes(
                slots,
                max(tokens, slots),
                num_qo_heads=heads.num_qo_heads,
                num_kv_heads=heads.num_kv_heads,
                head_dim=heads.head_dim,
                device=device,
            )
        )

    def _windowed_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the slots in the pool of layers with windows, if that is a separate pool."""
        return self._swa_kv_pool.translate_loc_from_full_to_swa(slots)


def _verified(forward_batch: Any) -> RaggedVerifyLayout | None:
    """Return the lengths of a ragged verification; None for any other batch."""
    return resolve_ragged_verify_layout(forward_batch) if forward_batch.forward_mode.is_target_verify() else None


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)
