"""Survival and top-K on the device: from confidences to verification lengths. See `outrider.kernels.drafts.admit`."""

import torch
import triton
import triton.language as tl

FEWEST = 64
"""Least requests that a program is compiled for: smaller variants are not faster and take compile time."""
MOST_ENTRIES = 65536
"""R * gamma of one program, in powers of two: 64 numbers in each of 1024 threads."""


@triton.jit(
    do_not_specialize=[
        "requests", "gamma", "request_stride", "token_stride", "bound_request_stride", "bound_token_stride",
        "has_bounds", "has_first",
    ]
)  # fmt: skip
def admit_kernel(
    confidence, draft_lens, tokens, bounds, first, verify_lens, survival, requests, gamma, request_stride,
    token_stride, bound_request_stride, bound_token_stride, has_bounds, has_first, REQUESTS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """One program holds all survivals in registers and finds the K-th by bisecting the bits of float32 (31 counts). A
    sort of 8192 numbers would take 91 exchanges through shared memory. Reads 4 * R * gamma bytes (gamma times,
    from L1: each entry multiplies its own prefix, in order), writes as many."""
    i = tl.arange(0, REQUESTS * WIDTH)
    r, k = i // WIDTH, i % WIDTH
    inside = (r < requests) & (k < gamma)
    exact = tl.full([REQUESTS * WIDTH], 1.0, tl.float64)  # rounded once, as torch's product on the CPU
    for j in range(0, gamma):
        c = tl.load(confidence + r * request_stride + j * token_stride, mask=inside & (j <= k), other=1.0)
        c = tl.where(c > 0.0, tl.where(c < 1.0, c, 1.0), 0.0)  # NaN is not above 0
        exact = exact * c
    drafted = tl.load(draft_lens + r, mask=inside, other=0)
    product = tl.where(k < drafted, exact.to(tl.float32), 0.0)
    tl.store(survival + r * gamma + k, product, mask=inside)
    if has_bounds:
        prefix, fits = tl.full([REQUESTS * WIDTH], 1.0, tl.float64), i >= 0
        for j in range(0, gamma):
            c = tl.load(confidence + r * request_stride + j * token_stride, mask=inside & (j <= k), other=1.0)
            prefix = prefix * tl.where(c > 0.0, tl.where(c < 1.0, c, 1.0), 0.0)
            least = tl.load(bounds + r * bound_request_stride + j * bound_token_stride, mask=inside, other=0.0)
            fits = fits & ((j > k) | (prefix.to(tl.float32) >= least))
        product = tl.where(fits, product, 0.0)
    if has_first:
        product = product * tl.where(tl.load(first + r, mask=inside, other=0) != 0, 18446744073709551616.0, 1.0)
    key = tl.where(inside, product.to(tl.int32, bitcast=True), -1)
    room = tl.load(tokens).to(tl.int32)
    low, high = tl.sum(i * 0), tl.sum(i * 0) + 0x7F800000
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = tl.sum((key >= middle).to(tl.int32)) >= room
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    room -= tl.sum((key > low).to(tl.int32))
    tied = key == low
    admitted = (key > 0) & ((key > low) | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= room)))
    counts = tl.sum(tl.reshape(admitted.to(tl.int32), (REQUESTS, WIDTH)), 1)
    owner = tl.arange(0, REQUESTS)
    tl.store(verify_lens + owner, counts.to(tl.int64), mask=owner < requests)


def admit(
    confidence: torch.Tensor,
    draft_lens: torch.Tensor,
    tokens: torch.Tensor,
    bounds: torch.Tensor | None,
    first: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    requests, gamma = confidence.shape
    padded, width = max(FEWEST, triton.next_power_of_2(requests)), triton.next_power_of_2(gamma)
    if padded * width > MOST_ENTRIES:
        raise ValueError(f"expected at most {MOST_ENTRIES // width} requests of {gamma} draft tokens, got {requests}")
    wide = confidence if bounds is None else bounds.expand(requests, gamma)
    found = torch.empty_like(draft_lens), confidence.new_empty(requests, gamma)
    admit_kernel[(1,)](
        confidence, draft_lens, tokens, wide, draft_lens.view(torch.bool) if first is None else first, *found,
        requests, gamma, confidence.stride(0), confidence.stride(1), wide.stride(0), wide.stride(1),
        int(bounds is not None), int(first is not None), REQUESTS=padded, WIDTH=width,
        num_warps=min(32, max(4, padded * width // 512)),
    )  # fmt: skip
    return found
