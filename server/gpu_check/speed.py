"""Part A, how fast: the device's own limits first, then each kernel beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from outrider.kernels.cuda import acceptance, attention, draft_block
from outrider.kernels.sampling import Rules

from .device import Device
from .report import Measured
from .step import decoder

COPY_BYTES = 4 << 30
QWEN3_8B_BYTES = 2 * 7_568_405_504
"""Of its weights in bfloat16 that a step reads: all but the embedding."""
REQUESTS = (1, 8, 32, 64)
TARGET_REQUESTS, TARGET_SHARE = 32, 0.12


def copy_rate(device: Device) -> float:
    """Bytes a second of a large copy on the device, read and written."""
    size = 1 << 16 if device.tiny else COPY_BYTES
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device.on)
    other = torch.empty_like(source)
    return 2 * size / device.seconds(lambda: other.copy_(source), calls=2)


def limits(device: Device) -> Iterator[Measured]:
    """Copies, products, launches."""
    yield Measured("copy, read and written", copy_rate(device) / 1e9, "GB/s")
    width = 64 if device.tiny else 8192
    a, b = (torch.randn(width, width, device=device.on).to(device.types[-1]) for _ in range(2))
    yield Measured(f"product of {width}²", 2 * width**3 / device.seconds(lambda: a @ b) / 1e12, "TFLOP/s")
    small = torch.zeros(16, device=device.on)
    yield Measured("launch", device.launch_seconds(lambda: small.add_(1)) * 1e6, "µs")
    yield Measured("launch in a graph", device.seconds(lambda: small.add_(1), calls=100) * 1e6, "µs")


@torch.inference_mode()
def shares(device: Device) -> Iterator[Measured]:
    """The bytes that each large kernel must move, over its time, beside those of a copy."""
    rate = copy_rate(device)
    for requests, context, queries in ((2, 100, 4),) if device.tiny else ((64, 4096, 8), (64, 4096, 1), (8, 32_768, 8)):
        run, size = _attention(device, requests, context, queries)
        share = size / device.seconds(run) / rate
        what = f"attention, {requests} × {context}, {queries} queries"
        wanted = 0.75 if (requests, context) == (64, 4096) else None
        yield Measured(what, share, "of a copy", at_least=wanted)
    for requests in (2,) if device.tiny else (8, 64):
        for filtered in (False, True):
            run, size = _acceptance(device, requests, filtered)
            what = f"acceptance, {requests} × 8 × 152 k{', filtered' if filtered else ''}"
            yield Measured(what, size / device.seconds(run) / rate, "of a copy")
        run, size = _draft_step(device, requests)
        yield Measured(f"draft step, {requests} × 152 k", size / device.seconds(run) / rate, "of a copy")


def _attention(device: Device, requests: int, context: int, queries: int) -> tuple[Callable[[], object], int]:
    """Qwen3-8B's heads in half precision; keys and values are read once."""
    dtype = device.types[-1]
    slots = requests * context
    pools = [torch.randn(slots, 8, 128, dtype=dtype, device=device.on) for _ in range(2)]
    table = torch.randperm(slots, device=device.on).int().view(requests, context)
    q = torch.randn(requests * queries, 32, 128, dtype=dtype, device=device.on)
    indptr = torch.arange(requests + 1, dtype=torch.int32, device=device.on) * queries
    lens = torch.full((requests,), context, dtype=torch.int32, device=device.on)
    rows = torch.arange(requests, device=device.on)

    def run() -> torch.Tensor:
        return attention.attention(q, *pools, indptr, lens, rows, table, queries, 128**-0.5, True, -1, 0.0)

    return run, 2 * pools[0].nbytes + table.nbytes + 2 * q.nbytes


def _acceptance(device: Device, requests: int, filtered: bool) -> tuple[Callable[[], object], int]:
    """All logits are read, and of each request a row of logits and one of q."""
    gamma, width = (2, 300) if device.tiny else (7, 151_936)
    on, rows = device.on, requests * (gamma + 1)
    logits = torch.randn(rows, width, device=on).to(device.types[-1])
    q = torch.randn(requests, gamma, width, device=on).softmax(-1)
    each = torch.ones(requests, device=on)
    rules = Rules(each, each.long() * 50, each * 0.95, each * 0.0) if filtered else Rules(each)
    tokens = torch.randint(width, (requests, gamma), device=on)
    request = torch.arange(requests, device=on).repeat_interleave(gamma + 1)
    keys = torch.arange(requests, device=on)
    arrays = (
        tokens, torch.full_like(keys, gamma), torch.arange(requests + 1, device=on) * (gamma + 1), request, logits,
        *rules, torch.rand(requests, gamma, device=on).double(), keys, None, keys < 0, q, None,
    )  # fmt: skip

    def run() -> object:
        return acceptance.accept(*arrays)

    return run, logits.nbytes + requests * width * (logits.itemsize + q.itemsize)


def _draft_step(device: Device, requests: int) -> tuple[Callable[[], object], int]:
    """W2 and the logits are read, q is written, read and written again."""
    width, rank, on, dtype = 300 if device.tiny else 151_936, 256, device.on, device.types[-1]
    q = torch.empty(requests, width, device=on)
    logits, w2 = (torch.randn(n, size, device=on).to(dtype) for n, size in ((requests, width), (width, rank)))
    latent, each = torch.randn(requests, rank, device=on).to(dtype), torch.ones(requests, device=on)
    keys = torch.arange(requests, device=on)

    def run() -> object:
        return draft_block.draft_step(q, logits, latent, w2, each, None, None, None, keys, None, True)

    return run, w2.nbytes + logits.nbytes + 3 * q.nbytes


@torch.inference_mode()
def overhead(device: Device) -> Iterator[Measured]:
    """Draft, plan, accept and commit beside the least that verification takes: reading the target's weights once."""
    made, most = decoder(device)
    floor = QWEN3_8B_BYTES / copy_rate(device)
    with device.triton():
        for requests in (1,) if device.tiny else (n for n in REQUESTS if n <= most):
            tier = requests * (made.gamma + 1)
            given = made.given(requests, requests * made.gamma, 0)
            draft = made.draft(given)
            lens, flat = made.plan(given, draft, tier)
            hidden, logits = made.verify(given, lens, flat)
            accepted = made.accept(given, draft, lens, flat, logits)
            stages: dict[str, Callable[[], object]] = {
                "draft": partial(made.draft, given),
                "plan and flatten": partial(made.plan, given, draft, tier),
                "accept": partial(made.accept, given, draft, lens, flat, logits),
                "commit and observe": partial(made.keep, given, flat, hidden, accepted),
            }
            times = {stage: device.seconds(run, calls=2) for stage, run in stages.items()}
            for stage, seconds in times.items():
                yield Measured(f"{stage}, {requests} requests", seconds * 1e3, "ms")
            wanted = TARGET_SHARE if requests == TARGET_REQUESTS else None
            share = sum(times.values()) / floor
            yield Measured(f"all, {requests} requests", share, "of reading Qwen3-8B's weights", at_most=wanted)
