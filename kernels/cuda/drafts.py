"""Decisions on a step's drafts, one launch each: choose lookup or model draft; calibrate confidences and find the end
of the answer. `drafters/lookup_first.py` and `kernels/drafts.py` have the same in torch."""

import torch
import triton
import triton.language as tl

from .noise import BITS


@triton.jit(do_not_specialize=["gamma", "request_stride", "token_stride", "chance_stride", "step_stride", "width"])
def weigh_kernel(
    tokens, confidence, classes, rows, ends, inverse, shifts, calibrated, until, gamma, request_stride, token_stride,
    chance_stride, step_stride, width, WIDTH: tl.constexpr, CALIBRATED: tl.constexpr,
):  # fmt: skip
    """Program r: request r. A confidence is computed in double precision and rounded once."""
    r, k = tl.program_id(0), tl.arange(0, WIDTH)
    inside = k < gamma
    token = tl.load(tokens + r * request_stride + k * token_stride, mask=inside, other=0)
    row, ended = tl.load(rows + r), k < 0
    for e in range(0, width):
        ended = ended | (token == tl.load(ends + row * width + e))
    tl.store(until + r, (tl.min(tl.where(ended & inside, k, gamma), 0) + 1).to(tl.int64))
    chance = tl.load(confidence + r * chance_stride + k * step_stride, mask=inside, other=0.0)
    if CALIBRATED:
        place = tl.load(classes + r) * gamma + k
        exact = tl.where(chance > 0.99999994, 0.99999994, chance).to(tl.float64)  # NaN is not above it
        slope = tl.load(inverse + place, mask=inside, other=0.0).to(tl.float64)
        logit = tl.load(shifts + place, mask=inside, other=0.0).to(tl.float64) + tl.log(exact / (1.0 - exact)) * slope
        chance = (1.0 / (1.0 + tl.exp(-logit))).to(tl.float32)
    tl.store(calibrated + r * gamma + k, chance, mask=inside)


def weigh_drafts(
    tokens: torch.Tensor, confidence: torch.Tensor, classes: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor,
    inverse: torch.Tensor | None, shifts: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    requests, gamma = tokens.shape
    calibrated, until = confidence.new_empty(requests, gamma), torch.empty_like(classes)
    if requests:
        weigh_kernel[(requests,)](
            tokens, confidence, classes, rows, ends, confidence if inverse is None else inverse.contiguous(),
            confidence if shifts is None else shifts.contiguous(), calibrated, until, gamma, *tokens.stride(),
            *confidence.stride(), ends.shape[1], WIDTH=max(2, triton.next_power_of_2(gamma)),
            CALIBRATED=inverse is not None, num_warps=1, **BITS,
        )  # fmt: skip
    return calibrated, until


@triton.jit(
    do_not_specialize=[
        "gamma", "model_gamma", "request_stride", "token_stride", "chance_stride", "step_stride", "threshold", "ratio",
    ]
)  # fmt: skip
def choose_kernel(
    found, found_lens, found_chances, drafted, drafted_lens, drafted_chances, tokens, lens, chances, looked_up,
    gamma, model_gamma, request_stride, token_stride, chance_stride, step_stride, threshold, ratio,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Program r: request r."""
    r, k = tl.program_id(0), tl.arange(0, WIDTH)
    inside, drawn = k < gamma, k < model_gamma
    expected, survival = tl.sum(k * 0.0), tl.sum(k * 0.0) + 1.0
    for j in range(0, model_gamma):
        survival = survival * tl.load(found_chances + r * gamma + j)
        expected = expected + survival
    length, first = tl.load(drafted_lens + r), tl.load(drafted_chances + r * chance_stride)
    better = (expected < threshold) & (length > 0) & (expected < ratio * first)
    token, chance = tl.load(found + r * gamma + k, mask=inside), tl.load(found_chances + r * gamma + k, mask=inside)
    its = tl.load(drafted + r * request_stride + k * token_stride, mask=drawn, other=0)
    sure = tl.load(drafted_chances + r * chance_stride + k * step_stride, mask=drawn, other=0.0)
    tl.store(tokens + r * gamma + k, tl.where(better, its, token), mask=inside)
    tl.store(chances + r * gamma + k, tl.where(better, sure, chance), mask=inside)
    tl.store(lens + r, tl.where(better, length, tl.load(found_lens + r)))
    tl.store(looked_up + r, better == 0)


def choose(
    found: torch.Tensor, found_lens: torch.Tensor, found_chances: torch.Tensor, drafted: torch.Tensor,
    drafted_lens: torch.Tensor, drafted_chances: torch.Tensor, threshold: float, ratio: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return tokens, lens, confidence and looked_up for R lookups of gamma tokens and R drafts of at most gamma."""
    requests, gamma = found.shape
    looked_up = torch.empty(requests, dtype=torch.bool, device=found.device)
    made = found.new_empty(found.shape), torch.empty_like(found_lens), found_chances.new_empty(found.shape), looked_up
    if requests:
        choose_kernel[(requests,)](
            found.contiguous(), found_lens, found_chances.contiguous(), drafted, drafted_lens, drafted_chances, *made,
            gamma, drafted.shape[1], *drafted.stride(), *drafted_chances.stride(), threshold, ratio,
            WIDTH=max(2, triton.next_power_of_2(gamma)), num_warps=1, **BITS,
        )  # fmt: skip
    return made
