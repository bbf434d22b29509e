"""Verifications over a paged KV cache: FlashInfer by our plans of single slots, fa3 over larger pages too.

Interpreted, the kernels come from `fa2` and `paged_kernels`. fa3 gets lengths on the device, no plan, as from SGLang.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import fa2
import numpy as np
import paged_kernels
import pytest
import torch
from batches import ragged_attention
from gpu_device import HALVES, INTERPRETED, ON, TOLERANCE, captured, row_error

from outrider.kernels.attention import Scores, torch_attention
from outrider.kernels.flat_batch import FlatBatch
from outrider.kernels.ragged import write_cached_slots
from outrider.kernels.upload import upload
from outrider.server.plugin.cuda.flashinfer_plan import PAGE, plan_verify

PAGES = (1, 16, 64)
WORKSPACE = 1 << 29
KV_HEADS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """A verification of query_lens tokens after seq_lens cached ones, in a bucket of `tokens`."""

    name: str
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    tokens: int
    group: int = 4
    dim: int = 128
    window: int = -1


SMALL = [
    Case("a bucket", [3, 1, 2], [140, 0, 9], 8, group=2, dim=64),
    Case("window", [3, 1, 2], [140, 0, 9], 8, group=2, dim=64, window=5),
]
LENS = [1, 8, 3, 8, 1, 1, 8, 2], [2900, 700, 64, 1500, 33, 4096, 0, 31_000]
LARGE = [
    Case("one request", [5], [2900], 5),
    Case("a bucket", *LENS, 36),
    Case("no padding", *LENS, 32),
    Case("one KV head each", *LENS, 36, group=1),
    Case("8 heads a KV head", *LENS, 36, group=8, dim=64),
    Case("window 0", *LENS, 36, window=0),
    Case("window 1000", *LENS, 36, window=1000),
    Case("256 requests", [1, 8, 2, 5] * 64, [400, 8, 5000, 50] * 64, 1152),
]
CASES = pytest.mark.parametrize("case", SMALL if INTERPRETED else LARGE, ids=lambda case: case.name)
IN_HALF = pytest.mark.parametrize("dtype", HALVES, ids=str)


@pytest.fixture
def flashinfer() -> Any:
    if INTERPRETED:
        return fa2.PagedWrapper
    return pytest.importorskip("flashinfer").BatchPrefillWithPagedKVCacheWrapper


@pytest.fixture
def fa3() -> Any:
    if INTERPRETED:
        return paged_kernels.flash_attn_with_kvcache
    return pytest.importorskip("sgl_kernel.flash_attn").flash_attn_with_kvcache


class Planned:
    """A case on the device, and FlashInfer's wrapper; optionally in a graph with the most slots."""

    def __init__(self, flashinfer: Any, case: Case, dtype: torch.dtype, *, graph: bool):
        self.case, self.dtype, self.slots = case, dtype, len(case.query_lens) + 1
        kv_lens = [a + b for a, b in zip(case.query_lens, case.seq_lens, strict=True)]
        self.heads = case.group * KV_HEADS, KV_HEADS
        q, keys, values, self.batch = ragged_attention(
            case.query_lens, kv_lens, heads=self.heads, dims=(case.dim, case.dim), dtype=dtype
        )
        self.host = q, keys, values
        self.q = torch.cat([q, q.new_zeros(case.tokens - len(q), *q.shape[1:])]).to(ON)
        self.cache = keys[:, None].to(ON), values[:, None].to(ON)
        self.table, self.rows = self.batch.page_table.to(ON), self.batch.rows.to(ON)
        self.listed = torch.zeros(sum(kv_lens) + case.tokens, dtype=torch.int32, device=ON)

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=ON)

        buffers: dict[str, Any] = {}
        if graph:
            buffers = {
                "use_cuda_graph": True, "qo_indptr_buf": zeros(self.slots + 1),
                "paged_kv_indptr_buf": zeros(self.slots + 1), "paged_kv_indices_buf": self.listed,
                "paged_kv_last_page_len_buf": zeros(self.slots),
            }  # fmt: skip
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=ON)
        self.wrapper = flashinfer(workspace, "NHD", backend="fa2", **buffers)

    def plan(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> None:
        plan = plan_verify(
            np.array(query_lens), np.array(seq_lens), tokens=self.case.tokens, slots=self.slots, window=self.case.window
        )
        listed = self.listed[: int(plan.kv_indptr[-1])]
        begins, indptr = (upload(numbers, listed.device) for numbers in (plan.kv_begins, plan.kv_indptr))
        write_cached_slots(listed, self.table, self.rows[: len(query_lens)], begins, indptr)
        indptrs = torch.from_numpy(plan.qo_indptr), torch.from_numpy(plan.kv_indptr)
        self.wrapper.plan(
            *indptrs, listed, torch.ones(self.slots, dtype=torch.int32), *self.heads, self.case.dim, PAGE, causal=True,
            window_left=self.case.window, q_data_type=self.dtype, kv_data_type=self.dtype,
        )  # fmt: skip

    def run(self) -> torch.Tensor:
        return self.wrapper.forward(
            self.q, self.cache, causal=True, sm_scale=self.case.dim**-0.5, window_left=self.case.window,
            logits_soft_cap=0.0,
        )  # fmt: skip

    def error(self, found: torch.Tensor) -> float:
        how = Scores(self.case.dim**-0.5, window=self.case.window)
        q, keys, values = (x.float() for x in self.host)
        return row_error(found[: len(q)], torch_attention(q, keys, values, self.batch, how))


class Paged:
    """A case without padding, with a KV cache of pages of `page` tokens."""

    def __init__(self, case: Case, dtype: torch.dtype, page: int):
        self.case, self.dtype, self.page = case, dtype, page
        generator, requests = torch.Generator(ON).manual_seed(0), len(case.query_lens)
        queries, cached = (torch.tensor(lens) for lens in (case.query_lens, case.seq_lens))
        kv_lens = queries + cached
        self.held = (kv_lens + page - 1) // page
        free = torch.randperm(int(self.held.sum()), generator=torch.Generator().manual_seed(0)).int()
        pages = torch.nn.utils.rnn.pad_sequence(free.split(self.held.tolist()), batch_first=True)
        self.kv_lens, self.pages = kv_lens.int().to(ON), pages.to(ON)
        self.indptr = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int().to(ON)
        self.heads = case.group * KV_HEADS, KV_HEADS

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=ON).to(dtype)

        self.q = normal(int(queries.sum()), self.heads[0], case.dim)
        self.keys, self.values = (normal(len(free), page, KV_HEADS, case.dim) for _ in range(2))
        slots = (pages[:, :, None] * page + torch.arange(page)).flatten(1)
        self.batch = FlatBatch(self.indptr.cpu(), kv_lens.int(), torch.arange(requests), slots.int())

    def fa3(self, attend: Any) -> Callable[[], torch.Tensor]:
        window = self.case.window

        def run() -> torch.Tensor:
            output: torch.Tensor = attend(
                q=self.q, k_cache=self.keys, v_cache=self.values, page_table=self.pages, cache_seqlens=self.kv_lens,
                cu_seqlens_q=self.indptr, max_seqlen_q=max(self.case.query_lens), softmax_scale=self.case.dim**-0.5,
                causal=True, window_size=(window, 0) if window >= 0 else (-1, -1), softcap=0.0,
            )  # fmt: skip
            return output

        return run

    def error(self, found: torch.Tensor) -> float:
        keys, values = (pool.cpu().float().flatten(0, 1) for pool in (self.keys, self.values))
        how = Scores(self.case.dim**-0.5, window=self.case.window)
        expected = torch_attention(self.q.cpu().float(), keys, values, self.batch, how)
        return row_error(found, expected)


@CASES
@IN_HALF
def test_flashinfer_by_our_plan(flashinfer: Any, case: Case, dtype: torch.dtype) -> None:
    planned = Planned(flashinfer, case, dtype, graph=False)
    planned.plan(case.query_lens, case.seq_lens)
    assert planned.error(planned.run()) <= TOLERANCE[dtype]


@CASES
@IN_HALF
def test_flashinfer_by_our_plan_in_a_graph_of_other_lengths(flashinfer: Any, case: Case, dtype: torch.dtype) -> None:
    """Captured with one token per request and an empty cache."""
    planned = Planned(flashinfer, case, dtype, graph=True)
    requests = len(case.query_lens)
    planned.plan([1] * requests, [0] * requests)
    replay = captured(planned.run)
    planned.plan(case.query_lens, case.seq_lens)
    assert planned.error(replay()) <= TOLERANCE[dtype]


def test_a_plan_of_other_lengths_is_detected(flashinfer: Any) -> None:
    case, dtype = SMALL[0], HALVES[0]
    planned = Planned(flashinfer, case, dtype, graph=False)
    planned.plan(case.query_lens, [max(0, n - 1) for n in case.seq_lens])
    assert planned.error(planned.run()) > TOLERANCE[dtype]


@CASES
@IN_HALF
@pytest.mark.parametrize("page", PAGES)
def test_fa3_over_pages_also_in_a_graph_of_other_lengths(fa3: Any, case: Case, dtype: torch.dtype, page: int) -> None:
    paged = Paged(case, dtype, page)
    run = paged.fa3(fa3)
    assert paged.error(run()) <= TOLERANCE[dtype]
    lens, indptr = paged.kv_lens.clone(), paged.indptr.clone()
    paged.kv_lens.fill_(1)
    paged.indptr.copy_(torch.arange(len(indptr)).clamp(max=len(paged.q)))
    replay = captured(run)
    paged.kv_lens.copy_(lens)
    paged.indptr.copy_(indptr)
    assert paged.error(replay()) <= TOLERANCE[dtype]
