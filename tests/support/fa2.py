"""FlashInfer's fa2 prefill kernels over a paged cache, index by index in torch on a CPU.

From the source of 0.6.15: a plan cuts queries into tiles and keys into chunks (`PrefillSplitQOKVIndptr` of
scheduler.cuh); the kernel masks, and writes partial results (`BatchPrefillWithPagedKVCacheDevice` of prefill.cuh). The
plan knows the host's lengths, the kernel the device's. Unwritten places hold NaN.
"""

from types import SimpleNamespace
from typing import Any

import torch

PROCESSORS = 8
"""Processors of the GPU; few, so that even short caches are cut."""
WORKSPACES: list[int] = []
"""Bytes of partial results that each plan needed."""


class PagedWrapper:
    """`BatchPrefillWithPagedKVCacheWrapper`, as far as SGLang uses it."""

    def __init__(
        self, workspace: torch.Tensor, layout: str, use_cuda_graph: bool = False, backend: str = "fa2",
        qo_indptr_buf: Any = None, paged_kv_indptr_buf: Any = None, paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
    ):  # fmt: skip
        self._float_workspace_buffer, self.is_cuda_graph_enabled, self._backend = workspace, use_cuda_graph, backend
        self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)
        self._qo_indptr_buf, self._paged_kv_indptr_buf = qo_indptr_buf, paged_kv_indptr_buf
        self._paged_kv_indices_buf = paged_kv_indices_buf
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buf
        self.device, self._max_total_num_rows, self._cached_module = workspace.device, None, None
        self.begin_forward = self.plan

    def reset_workspace_buffer(self, workspace: torch.Tensor, plans: torch.Tensor) -> None:
        self._float_workspace_buffer, self._int_workspace_buffer = workspace, plans

    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, last_page: torch.Tensor,
        heads: int, kv_heads: int, head_dim: int, page_size: int, *, causal: bool, window_left: int = -1,
        q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        given = qo_indptr, kv_indptr, kv_indices, last_page
        names = "_qo_indptr_buf", "_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf"
        for name, array in zip(names, given, strict=True):
            if self.is_cuda_graph_enabled:  # a graph's own arrays, at fixed addresses
                getattr(self, name)[: len(array)].copy_(array)
                assert name == "_paged_kv_indices_buf" or len(array) == len(getattr(self, name))
            else:
                setattr(self, name, array.clone())
        rows = int(qo_indptr[-1])
        if self._max_total_num_rows is None:
            self._max_total_num_rows = rows
        assert not self.is_cuda_graph_enabled or rows <= self._max_total_num_rows
        self._compiled_window, self._qo_indptr_last = window_left >= 0, rows
        self._cached_module = SimpleNamespace(plan=self._cut)
        self._plan_info = self._cut(
            self._float_workspace_buffer, self._int_workspace_buffer, None, qo_indptr, kv_indptr, None,
            self._max_total_num_rows if self.is_cuda_graph_enabled else rows, len(last_page), heads, kv_heads,
            page_size, self.is_cuda_graph_enabled, head_dim, head_dim, causal, window_left, -1, False, 0, 0,
        )  # fmt: skip

    def _cut(
        self, workspace: Any, plans: Any, pinned: Any, qo_indptr: Any, kv_indptr: Any, kv_lens: Any, rows: int,
        count: int, heads: int, kv_heads: int, page_size: int, graph: bool, head_dim: int, value_dim: int, causal: bool,
        window: int, fixed_split: int, no_split: bool, colocated: int, uniform: int = 0,
    ) -> Any:  # fmt: skip
        """The plan; SGLang's `fast_prefill_plan` calls it as well."""
        assert (page_size, no_split, fixed_split) == (1, False, -1)
        group, most = heads // kv_heads, 2 * PROCESSORS // kv_heads
        packed, cached = ((x.diff() * by).tolist() for x, by in ((qo_indptr, group), (kv_indptr, 1)))
        size = (rows - count + 1) * group if graph else sum(packed) // count
        tile = 128 if size > 64 and head_dim < 256 else 64 if size > 16 else 16
        seen = [min(window + tile, length) if window >= 0 else length for length in cached]

        def parts(chunk: int) -> int:
            return sum(-(-p // tile) * -(-max(s, 1) // chunk) for p, s in zip(packed, seen, strict=True))

        low, high = 128, max([1, *seen])
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if parts(middle) > most else (low, middle)
        work, merge, starts = [], [0], [0]
        for request, (p, s) in enumerate(zip(packed, seen, strict=True)):
            chunks = -(-max(s, 1) // low)
            work += [(request, q, k) for q in range(-(-p // tile)) for k in range(chunks)]
            merge += [merge[-1] + chunks * (row + 1) for row in range(p // group)]
            starts.append(starts[-1] + p // group * chunks)
        blocks = max(most, -(-rows * group // tile) + count - 1) if graph else len(work)
        assert len(work) <= blocks, "more blocks than a graph has"
        split = graph or low < max([1, *seen])
        WORKSPACES.append(heads * blocks * tile * (head_dim + 1) * 4 if split else 0)
        assert WORKSPACES[-1] <= workspace.numel(), "Buffer overflow when allocating memory for batch_prefill_tmp_v"
        assert 13 * blocks + 4 * (rows + count + 2) <= plans.numel()
        return SimpleNamespace(work=work, merge=merge, starts=starts, tile=tile, chunk=low, split=split)

    def forward(
        self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], *, causal: bool, sm_scale: float,
        window_left: int, logits_soft_cap: float, k_scale: Any = None, v_scale: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        assert not logits_soft_cap, "only plans with a cap have one"
        plan, (keys, values) = self._plan_info, (x.flatten(0, 1) if x.dim() == 4 else x for x in cache)
        group, dim = q.shape[1] // keys.shape[1], values.shape[2]
        places = plan.starts[-1] + 1 if plan.split else len(q)
        partial = torch.full((places, q.shape[1], dim), torch.nan)
        sums = torch.full((places, q.shape[1]), torch.nan)
        for request, q_tile, k_tile in plan.work:
            begin, end = self._qo_indptr_buf[request : request + 2].tolist()
            first, last = self._paged_kv_indptr_buf[request : request + 2].tolist()
            length = 0 if first == last else last - first - 1 + int(self._paged_kv_last_page_len_buf[request])
            queries, window = end - begin, window_left if window_left >= 0 else length
            start = max(length + q_tile * plan.tile // group - queries - window, 0)
            low, high = start, length
            if plan.split:
                low, high = (min((k_tile + i) * plan.chunk + start, length) for i in (0, 1))
            chunks = -(-min(max(length, 1), window + plan.tile) // plan.chunk)
            slots = self._paged_kv_indices_buf[first + low : first + high].long()
            for row in range(q_tile * plan.tile, min((q_tile + 1) * plan.tile, queries * group)):
                query, position = row // group, length - queries + row // group
                place = plan.starts[request] + query * chunks + k_tile if plan.split else begin + query
                at = torch.arange(low, high)
                seen = at <= position if causal else at >= 0
                if self._compiled_window:
                    seen &= at >= position - window
                names = torch.arange(keys.shape[1]) * group + row % group
                scores = torch.einsum("nhd,hd->hn", keys[slots[seen]].float(), q[begin + query, names].float())
                weights = scores.mul(sm_scale).softmax(1)
                partial[place, names] = torch.einsum("hn,nhd->hd", weights, values[slots[seen]].float())
                sums[place, names] = scores.mul(sm_scale).logsumexp(1)  # -inf for no keys
        if not plan.split:
            return partial.to(q.dtype)
        out = torch.zeros(len(q), q.shape[1], dim)
        for row, (first, last) in enumerate(zip(plan.merge, plan.merge[1:], strict=False)):
            out[row] = (sums[first:last].softmax(0)[..., None] * partial[first:last]).sum(0)
        return out.to(q.dtype)
