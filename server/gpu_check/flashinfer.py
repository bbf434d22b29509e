"""Part B: FlashInfer's own kernels, by the plans that our backend makes of ragged verifications."""

from __future__ import annotations

import pkgutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import batches as random_batches
import numpy as np
import torch

from outrider.kernels.attention import torch_attention
from outrider.kernels.ragged import write_cached_slots
from outrider.scheduler.upload import upload

from ..errors import UserError
from ..plugin.cuda.flashinfer_plan import PAGE, plan_verify
from .attention import TOLERANCE
from .device import Device
from .kernels import name
from .report import Measured

WORKSPACE = 1 << 29
KV_HEADS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """A verification of query_lens tokens behind seq_lens cached ones, in a tier of `tokens`."""

    name: str
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    tokens: int
    group: int = 4
    dim: int = 128
    window: int = -1


SMALL = (
    Case("a tier", [3, 1, 2], [140, 0, 9], 8, group=2, dim=64),
    Case("window", [3, 1, 2], [140, 0, 9], 8, group=2, dim=64, window=5),
)
LENS = [1, 8, 3, 8, 1, 1, 8, 2], [2900, 700, 64, 1500, 33, 4096, 0, 31_000]
CASES = (
    Case("one request", [5], [2900], 5),
    Case("a tier", *LENS, 36),
    Case("no padding", *LENS, 32),
    Case("one KV head each", *LENS, 36, group=1),
    Case("8 heads a KV head", *LENS, 36, group=8, dim=64),
    Case("window 0", *LENS, 36, window=0),
    Case("window 1000", *LENS, 36, window=1000),
    Case("256 requests", [1, 8, 2, 5] * 64, [400, 8, 5000, 50] * 64, 1152),
)


class Verification:
    """A case on the device, and a wrapper of FlashInfer's: in a graph of as many slots as there could be, or not."""

    def __init__(self, device: Device, case: Case, dtype: torch.dtype, *, graph: bool):
        self.case, self.dtype, self.slots = case, dtype, len(case.query_lens) + 1
        kv_lens = [a + b for a, b in zip(case.query_lens, case.seq_lens, strict=True)]
        self.heads = case.group * KV_HEADS, KV_HEADS
        q, keys, values, self.batch = random_batches.ragged_attention(
            case.query_lens, kv_lens, heads=self.heads, dims=(case.dim, case.dim), dtype=dtype
        )
        self.host = q, keys, values
        self.q = torch.cat([q, q.new_zeros(case.tokens - len(q), *q.shape[1:])]).to(device.on)
        self.cache = keys[:, None].to(device.on), values[:, None].to(device.on)
        self.table, self.rows = self.batch.page_table.to(device.on), self.batch.rows.to(device.on)
        self.listed = torch.zeros(sum(kv_lens) + case.tokens, dtype=torch.int32, device=device.on)

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device.on)

        buffers: dict[str, Any] = {}
        if graph:
            buffers = {
                "use_cuda_graph": True, "qo_indptr_buf": zeros(self.slots + 1),
                "paged_kv_indptr_buf": zeros(self.slots + 1), "paged_kv_indices_buf": self.listed,
                "paged_kv_last_page_len_buf": zeros(self.slots),
            }  # fmt: skip
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device.on)
        self.wrapper = wrapper_class()(workspace, "NHD", backend="fa2", **buffers)

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
        """As SGLang calls it."""
        return self.wrapper.forward(
            self.q, self.cache, causal=True, sm_scale=self.case.dim**-0.5, window_left=self.case.window,
            logits_soft_cap=0.0,
        )  # fmt: skip

    def error(self, found: torch.Tensor) -> float:
        """The largest of a row, as a share of its length."""
        scale, window = self.case.dim**-0.5, self.case.window
        q, keys, values = (x.float() for x in self.host)
        expected = torch_attention(q, keys, values, self.batch, scale=scale, window=window)
        difference = (found[: len(q)].cpu().float() - expected).norm(dim=-1)
        return float((difference / expected.norm(dim=-1).clamp_min(1e-6)).nan_to_num(torch.inf).max())


def references(device: Device) -> Iterator[Measured]:
    """Outside graphs."""
    for case, dtype in _cases(device):
        verification = Verification(device, case, dtype, graph=False)
        verification.plan(case.query_lens, case.seq_lens)
        error = verification.error(verification.run())
        yield Measured(f"{name(dtype)}, {case.name}", error, "of a row", at_most=TOLERANCE[dtype])


def replays(device: Device) -> Iterator[Measured]:
    """Captured with a token of each request and none cached, and replayed."""
    for case, dtype in _cases(device):
        verification = Verification(device, case, dtype, graph=True)
        requests = len(case.query_lens)
        verification.plan([1] * requests, [0] * requests)
        replay = device.graph(verification.run)
        verification.plan(case.query_lens, case.seq_lens)
        error = verification.error(replay())
        yield Measured(f"{name(dtype)}, {case.name}, replayed", error, "of a row", at_most=TOLERANCE[dtype])


def plans(device: Device) -> Iterator[Measured]:
    """What a step waits for the host behind the lengths, and the kernel beside it."""
    for requests in (2,) if device.tiny else (8, 64, 256):
        lens, cached = [4] * requests, [128 if device.tiny else 4096] * requests
        case = Case(f"{requests} × {cached[0]}", lens, cached, 4 * requests, group=2 if device.tiny else 4)
        verification = Verification(device, case, device.types[-1], graph=True)
        taken = []
        for _ in range(3 if device.tiny else 30):
            device.synchronise()
            begin = time.perf_counter()
            verification.plan(lens, cached)
            taken.append(time.perf_counter() - begin)
        yield Measured(f"plan of {case.name}, host", statistics.median(taken) * 1e6, "µs")
        yield Measured(f"attention of {case.name}", device.seconds(verification.run) * 1e6, "µs")


def _cases(device: Device) -> Iterator[tuple[Case, torch.dtype]]:
    for case in SMALL if device.tiny else CASES:
        yield from ((case, dtype) for dtype in device.types if dtype != torch.float32)  # which FlashInfer has not


def wrapper_class() -> Any:
    try:
        return pkgutil.resolve_name("flashinfer:BatchPrefillWithPagedKVCacheWrapper")
    except ImportError as error:
        raise UserError(f"FlashInfer is not installed here: {error}") from None
