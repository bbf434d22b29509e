"""Part B: verifications over pages of 1, 16 and 64 tokens, by fa3 and by FlashInfer's fa2, right and how fast.

fa3 is called as SGLang's backend calls it for a ragged verification: lengths on the device, nothing planned.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from outrider.kernels.attention import torch_attention
from outrider.kernels.flat_batch import FlatBatch

from ..errors import UserError
from .attention import TOLERANCE
from .device import Device
from .flashinfer import CASES, KV_HEADS, SMALL, WORKSPACE, Case, wrapper_class
from .kernels import name
from .report import Measured
from .speed import copy_rate

PAGES = (1, 16, 64)


class Paged:
    """A case without padding, whose KV cache has pages of `page` tokens, in random order."""

    def __init__(self, device: Device, case: Case, dtype: torch.dtype, page: int):
        self.case, self.dtype, self.page, self.on = case, dtype, page, device.on
        generator, requests = torch.Generator(device.on).manual_seed(0), len(case.query_lens)
        queries, cached = (torch.tensor(lens) for lens in (case.query_lens, case.seq_lens))
        kv_lens = queries + cached
        self.held = (kv_lens + page - 1) // page
        free = torch.randperm(int(self.held.sum()), generator=torch.Generator().manual_seed(0)).int()
        pages = torch.nn.utils.rnn.pad_sequence(free.split(self.held.tolist()), batch_first=True)
        self.kv_lens, self.pages, self.listed = kv_lens.int().to(device.on), pages.to(device.on), free.to(device.on)
        self.indptr = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int().to(device.on)
        self.heads = case.group * KV_HEADS, KV_HEADS

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device.on).to(dtype)

        self.q = normal(int(queries.sum()), self.heads[0], case.dim)
        self.keys, self.values = (normal(len(free), page, KV_HEADS, case.dim) for _ in range(2))
        slots = (pages[:, :, None] * page + torch.arange(page)).flatten(1)
        self.batch = FlatBatch(self.indptr.cpu(), kv_lens.int(), torch.arange(requests), slots.int())

    @property
    def bytes_moved(self) -> int:
        """Keys and values once, queries and results."""
        cached = int(self.kv_lens.sum()) * KV_HEADS * self.case.dim * 2 * self.q.element_size()
        return cached + 2 * self.q.nbytes

    def fa3(self) -> Callable[[], torch.Tensor]:
        attend, window = fa3_function(), self.case.window

        def run() -> torch.Tensor:
            found: torch.Tensor = attend(
                q=self.q, k_cache=self.keys, v_cache=self.values, page_table=self.pages, cache_seqlens=self.kv_lens,
                cu_seqlens_q=self.indptr, max_seqlen_q=max(self.case.query_lens), softmax_scale=self.case.dim**-0.5,
                causal=True, window_size=(window, 0) if window >= 0 else (-1, -1), softcap=0.0,
            )  # fmt: skip
            return found

        return run

    def flashinfer(self) -> Callable[[], torch.Tensor]:
        """Planned here, as FlashInfer is meant to be, its lists in its own order."""
        count, window = len(self.case.query_lens), self.case.window
        wrapper = wrapper_class()(torch.empty(WORKSPACE, dtype=torch.uint8, device=self.on), "NHD", backend="fa2")
        indptr = torch.nn.functional.pad(self.held.cumsum(0), (1, 0)).int()
        last = (self.kv_lens - 1) % self.page + 1
        wrapper.plan(
            self.indptr.cpu(), indptr, self.listed, last.cpu(), *self.heads, self.case.dim, self.page, causal=True,
            window_left=window, q_data_type=self.dtype, kv_data_type=self.dtype,
        )  # fmt: skip
        assert len(indptr) == count + 1

        def run() -> torch.Tensor:
            found: torch.Tensor = wrapper.forward(
                self.q, (self.keys, self.values), causal=True, sm_scale=self.case.dim**-0.5, window_left=window,
                logits_soft_cap=0.0,
            )  # fmt: skip
            return found

        return run

    def error(self, found: torch.Tensor) -> float:
        """The largest of a row, as a share of its length."""
        keys, values = (pool.cpu().float().flatten(0, 1) for pool in (self.keys, self.values))
        scale, window = self.case.dim**-0.5, self.case.window
        expected = torch_attention(self.q.cpu().float(), keys, values, self.batch, scale=scale, window=window)
        difference = (found.cpu().float() - expected).norm(dim=-1)
        return float((difference / expected.norm(dim=-1).clamp_min(1e-6)).nan_to_num(torch.inf).max())


def pages(device: Device) -> Iterator[Measured]:
    """Beside the torch reference, fa3 also in replays on other lengths; in the type that the pack brings."""
    dtype = device.types[-1]
    for case in SMALL if device.tiny else CASES:
        for page in PAGES:
            paged = Paged(device, case, dtype, page)
            what, most = f"{name(dtype)}, {case.name}, pages of {page}", TOLERANCE[dtype]
            yield Measured(f"FlashInfer, {what}", paged.error(paged.flashinfer()()), "of a row", at_most=most)
            run = paged.fa3()
            yield Measured(f"fa3, {what}", paged.error(run()), "of a row", at_most=most)
            lens, indptr = paged.kv_lens.clone(), paged.indptr.clone()
            paged.kv_lens.fill_(1)
            paged.indptr.copy_(torch.arange(len(indptr)).clamp(max=len(paged.q)))
            replay = device.graph(run)
            paged.kv_lens.copy_(lens)
            paged.indptr.copy_(indptr)
            yield Measured(f"fa3, {what}, replayed", paged.error(replay()), "of a row", at_most=most)


def shares(device: Device) -> Iterator[Measured]:
    """Bytes that a verification must move over its time, beside those of a copy: both kernels, every page size."""
    rate, dtype = copy_rate(device), device.types[-1]
    for requests, context, queries in ((2, 100, 2),) if device.tiny else ((64, 4096, 8), (64, 4096, 1), (8, 32_768, 8)):
        dim = 64 if device.tiny else 128
        case = Case(
            f"{requests} × {context}, {queries} queries", [queries] * requests, [context] * requests, 0, dim=dim
        )
        for page in PAGES:
            paged = Paged(device, replace(case, group=2 if device.tiny else 4), dtype, page)
            for kernel in (paged.fa3, paged.flashinfer):
                seconds = device.seconds(kernel())
                what = f"{kernel.__name__}, {case.name}, pages of {page}"
                yield Measured(what, paged.bytes_moved / seconds / rate, f"of a copy, {seconds * 1e6:.0f} µs")


def fa3_function() -> Any:
    try:
        return pkgutil.resolve_name("sgl_kernel.flash_attn:flash_attn_with_kvcache")
    except ImportError as error:
        raise UserError(f"sglang-kernel, which has fa3, is not installed here: {error}") from None
