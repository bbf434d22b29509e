"""Decisions on a step's drafts before any is verified: calibrated confidences, ends of answers, and admission."""

import numpy as np
import torch

from .cpu import native
from .cuda import native as cuda

BELOW_ONE = 1 - 2.0**-24
"""The largest float32 below 1, to which confidences are bounded: float32's sigmoid rounds to 1, which no temperature
could soften."""

Parameters = tuple[torch.Tensor, torch.Tensor]
"""1 / T and b of c' = sigmoid(logit(c) / T + b): [classes, gamma] float32 each."""


def weigh_drafts(
    tokens: torch.Tensor,
    confidence: torch.Tensor,
    classes: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    parameters: Parameters | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return calibrated confidences [R, gamma] float32, by the `parameters` of each request's class (None: unchanged; 0
    and NaN stay); and [R] int64, drafted tokens up to and including the first that ends the answer, else gamma + 1.

    tokens: [R, gamma] int64. confidence: [R, gamma] float32. classes, rows: [R] int64. ends: [all rows, E] int64, the
    tokens that end the answer in each row.
    """
    inverse, shifts = parameters or (None, None)
    if cuda.fits(confidence):
        return cuda.drafts.weigh_drafts(tokens, confidence, classes, rows, ends, inverse, shifts)
    if native.fits(confidence):
        return torch.ops.outrider.weigh_drafts(tokens, confidence, classes, rows, ends, inverse, shifts)
    goes_on = (tokens[:, :, None] != ends[rows][:, None]).all(2)
    until = goes_on.long().cumprod(1).sum(1) + 1
    if inverse is None or shifts is None:
        return confidence, until
    logits = confidence.clamp(max=BELOW_ONE).double().logit_()  # rounded once, as by the kernel for CUDA
    return (shifts[classes] + logits * inverse[classes]).sigmoid_().float(), until


def survival_of(confidence: torch.Tensor, draft_lens: torch.Tensor | None = None) -> torch.Tensor:
    """Return prefix survival [R, gamma] float32 of confidence [R, gamma]; 0 at and beyond `draft_lens` [R].

    Confidences are clamped to 0..1, NaN to 0, so a broken drafter costs only speed.
    """
    if confidence.device.type != "cpu":
        return survival_torch(confidence, draft_lens)
    clamped = np.fmax(confidence.float().numpy(), 0.0)  # numpy's calls cost less than torch's
    np.fmin(clamped, 1.0, out=clamped)
    survival = torch.from_numpy(clamped).cumprod_(1)
    if draft_lens is not None and np.count_nonzero(draft_lens.numpy() < clamped.shape[1]):
        clamped *= np.arange(clamped.shape[1]) < draft_lens.numpy()[:, None]
    return survival


def survival_torch(confidence: torch.Tensor, draft_lens: torch.Tensor | None = None) -> torch.Tensor:
    """Do `survival_of` on any device, without waiting for it."""
    # nan_to_num first: a clamp lets NaN through. cummin, because products in parallel round differently at each
    # position, and survival must not rise.
    survival = torch.nan_to_num(confidence.float(), nan=0.0).clamp_(0.0, 1.0).cumprod_(1).cummin(1).values
    if draft_lens is not None:
        survival *= torch.arange(survival.shape[1], device=survival.device) < draft_lens[:, None]
    return survival


def admit(
    confidence: torch.Tensor,
    draft_lens: torch.Tensor,
    tokens: torch.Tensor,
    *,
    bounds: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return verify_lens [R] int64 in 0..draft_lens and survival [R, gamma] float32, without waiting for the device.

    Admit the K drafted tokens of largest survival c_1 ... c_k above 0; ties go to the smaller request, then the smaller
    position (DSpark, section 3.2.2). Admission of x_{r,k} depends on c_{r,1..k} and on other requests.

    confidence: [R, gamma] float32, calibrated; NaN counts as 0. draft_lens: [R] int64. tokens: [1] int64, K.
    bounds: [gamma] or [R, 1] float32, a survival below its bound ends the admission of a request; None: no bounds.
    first: [R] bool, requests admitted before all other requests; None: none.
    """
    if cuda.fits(confidence):
        return cuda.admission.admit(confidence, draft_lens, tokens, bounds, first)
    if native.fits(confidence):
        return torch.ops.outrider.admit(confidence, draft_lens, tokens, bounds, first)
    survival = survival_of(confidence, draft_lens)
    worth = survival if bounds is None else survival * (survival >= bounds).cumprod(1)
    if first is not None:
        worth = torch.where(first[:, None], worth * 2.0**64, worth)
    order = worth.flatten().sort(descending=True, stable=True).indices
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return ((ranks.view_as(worth) < tokens) & (worth > 0)).sum(1), survival
