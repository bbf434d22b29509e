"""What is known of a step's drafts before any is verified: calibrated confidences, and where one ends its answer."""

from __future__ import annotations

import torch

from outrider.kernels.cpu import native

SURE = 1 - 2.0**-24
"""The largest float32 below 1, to which confidences are bounded: float32's sigmoid rounds to 1, which no temperature
could soften."""

Parameters = tuple[torch.Tensor, torch.Tensor]
"""1 / T and b of c' = sigmoid(logit(c) / T + b): [cases, gamma] float32 each."""


def weigh_drafts(
    tokens: torch.Tensor,
    confidence: torch.Tensor,
    cases: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    parameters: Parameters | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calibrated confidences [R, gamma] float32, each request's by the `parameters` of its case (None: as they are; 0
    and NaN stay); and [R] int64, drafted tokens up to the first that ends the answer, itself included, gamma + 1
    without such a token.

    tokens: [R, gamma] int64. confidence: [R, gamma] float32. cases, rows: [R] int64. ends: [all rows, E] int64, the
    tokens that end the answer in each row.
    """
    if native.fits(confidence):
        inverse, shifts = parameters or (None, None)
        return torch.ops.outrider.weigh_drafts(tokens, confidence, cases, rows, ends, inverse, shifts)
    return torch_weigh_drafts(tokens, confidence, cases, rows, ends, parameters)


def torch_weigh_drafts(
    tokens: torch.Tensor,
    confidence: torch.Tensor,
    cases: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    parameters: Parameters | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`weigh_drafts` without compiled kernels, on any device and without waiting for it."""
    goes_on = (tokens[:, :, None] != ends[rows][:, None]).all(2)
    until = goes_on.long().cumprod(1).sum(1) + 1
    if parameters is None:
        return confidence, until
    inverse, shifts = parameters
    calibrated = torch.addcmul(shifts[cases], confidence.clamp(max=SURE).logit_(), inverse[cases]).sigmoid_()
    return calibrated, until
