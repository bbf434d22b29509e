"""Part A, attention over scattered slots beside its torch reference, which runs on the host in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import batches as random_batches
import torch

from outrider.kernels.attention import torch_attention
from outrider.kernels.cuda import attention
from outrider.kernels.flat_batch import FlatBatch

from .device import Device
from .kernels import differing, name
from .report import Measured

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Of a row's length, that its difference may have: a few roundings of the type."""


@dataclass(frozen=True, slots=True)
class Case:
    """q_lens, kv_lens: of the requests. group: query heads of a KV head. least: positions of a split; None: as is."""

    name: str
    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    group: int = 4
    dim: int = 128
    causal: bool = True
    window: int = -1
    cap: float = 0.0
    least: int | None = None


SMALL = (
    Case("one token", [1], [1]),
    Case("a step", [16, 0, 1], [40, 9, 130], least=64),
    Case("window, capped", [2, 5], [130, 5], group=3, dim=64, window=3, cap=5.0, least=64),
    Case("draft block", [8], [70], group=1, causal=False),
)
MIXED = [1, 8, 3, 16, 0, 1, 8, 2], [2900, 700, 64, 1500, 33, 4096, 8, 512]
CASES = (
    *SMALL,
    Case("one request, γ 15", [16], [2900]),
    Case("a step of a few", *MIXED),
    Case("a step, one KV head each", *MIXED, group=1),
    Case("a step, 8 heads a KV head", *MIXED, group=8, dim=64),
    Case("a step, window 0", *MIXED, window=0),
    Case("a step, window 1000", *MIXED, window=1000),
    Case("a step, capped at 30", *MIXED, cap=30.0),
    Case("draft blocks", [8] * 7, MIXED[1][:4] + MIXED[1][5:], causal=False),
    Case("pieces of prompts", [500, 1, 129], [900, 2000, 129]),
    Case("300 requests", [1, 8, 0] * 100, [400, 8, 50] * 100),
)


def references(device: Device) -> Iterator[Measured]:
    """Errors by row, in every type."""
    for case in SMALL if device.tiny else CASES:
        for dtype in device.types:
            found, expected, padding = _both(device, case, dtype)
            length = expected.norm(dim=-1).clamp_min(1e-6)
            error = ((found.float() - expected).norm(dim=-1) / length).nan_to_num(torch.inf)
            yield Measured(f"{name(dtype)}, {case.name}", float(error.max()), "of a row", at_most=TOLERANCE[dtype])
            if padding.any():
                yield Measured(f"{name(dtype)}, {case.name}: padding", int(padding.count_nonzero()), "≠ 0", at_most=0)


def _both(device: Device, case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the kernel computes, what it should, and what it left in three rows of padding."""
    heads, dims = (2 * case.group, 2), (case.dim, case.dim)
    q, k_pool, v_pool, batch = random_batches.ragged_attention(
        case.q_lens, case.kv_lens, heads=heads, dims=dims, dtype=dtype
    )
    keywords = {"scale": case.dim**-0.5, "causal": case.causal, "window": case.window, "logit_cap": case.cap}
    expected = torch_attention(q.float(), k_pool.float(), v_pool.float(), batch, **keywords)  # type: ignore[arg-type]
    padded = torch.cat([q, q.new_full((3, *q.shape[1:]), torch.nan)])
    least, attention.LEAST = attention.LEAST, case.least or attention.LEAST
    try:
        found = attend(padded, k_pool, v_pool, batch, case, device.on).cpu()
    finally:
        attention.LEAST = least
    return found[: len(q)], expected, found[len(q) :]


def attend(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, batch: FlatBatch, case: Case, device: torch.device
) -> torch.Tensor:
    """The operator, on the device."""
    arrays = (x.to(device) for x in (batch.qo_indptr, batch.kv_lens, batch.rows, batch.page_table))
    pools = (x.to(device) for x in (q, k_pool, v_pool))
    most = max(1, batch.max_q_len)
    return attention.attention(*pools, *arrays, most, case.dim**-0.5, case.causal, case.window, case.cap)


def invariance(device: Device) -> Iterator[Measured]:
    """In float32 a query has the same bits alone and beside others."""
    lens = ([4, 16], [90, 200]) if device.tiny else ([4, 16, 1, 8], [900, 2000, 3000, 64])
    q, k_pool, v_pool, batch = random_batches.ragged_attention(*lens, heads=(8, 2), dims=(128, 128))
    for window in (-1, 20):
        case = Case("", *lens, window=window)
        together = attend(q, k_pool, v_pool, batch, case, device.on)
        # The first token of a tile, through the interpreter: products of numpy depend on a row's place.
        tokens = (0, 4, 12) if device.tiny else range(len(q))
        wrong = 0
        for token in tokens:
            one = attend(q[token, None], k_pool, v_pool, random_batches.alone(batch, token), case, device.on)
            wrong += differing(one[0], together[token])
        yield Measured(f"float32, alone and together, window {window}", wrong, "differ", at_most=0)
