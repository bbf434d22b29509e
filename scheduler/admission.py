"""Survival, and the top-K that admits draft tokens by it (DSpark, section 3.2.2 and 5.2).

a_{r,j} = c_{r,1} ... c_{r,j} never rises with j. Ties go to the smaller request, then to the smaller position. So the K
largest are a prefix of every request, and whether x_{r,k} is among them depends only on c_{r,1..k} and on other
requests: a later entry of its own request never precedes it.
"""

from typing import Protocol

import numpy as np
import torch

from .upload import upload, upload_together

FIRST = 2.0**64
"""Factor of the survivals of requests that are served first: exact in float32, and it puts survivals above 2^-64 ahead
of all."""


class Admit(Protocol):
    """`largest` in one call, `kernels.drafts.admit`; the server sets it where it is compiled."""

    def __call__(
        self,
        confidence: torch.Tensor,
        draft_lens: torch.Tensor,
        tokens: torch.Tensor,
        *,
        bounds: torch.Tensor | None,
        first: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """verify_lens [R] and survival [R, gamma]. tokens: [1] int64. bounds: float32. first: [R] bool."""


def largest(
    confidence: torch.Tensor,
    draft_lens: torch.Tensor,
    tokens: int | None,
    *,
    bounds: np.ndarray | None = None,
    first: np.ndarray | None = None,
    admit: Admit | None = None,
) -> torch.Tensor:
    """verify_lens [R] int64: the `tokens` drafts of largest survival (None: all), on the confidence's device.

    confidence: [R, gamma]. draft_lens: [R] int64. first: as in `top_k`.
    bounds: above 0, [R, 1] or [gamma]; the first survival below its bound ends a request's tokens.
    """
    if admit is None:
        survival = survival_of(confidence, draft_lens)
        return top_k(survival if bounds is None else at_least(survival, bounds), tokens, first)
    most = confidence.numel() if tokens is None else tokens
    if bounds is None and first is None:
        return admit(confidence.float(), draft_lens, draft_lens.new_full((1,), most), bounds=None, first=None)[0]
    given = [None if bounds is None else bounds.astype(np.float32), first]
    sent = iter(upload_together([np.array([most]), *(x for x in given if x is not None)], confidence.device))
    number, least, ahead = next(sent), *(None if x is None else next(sent) for x in given)
    return admit(confidence.float(), draft_lens, number, bounds=least, first=ahead)[0]


def survival_of(confidence: torch.Tensor, draft_lens: torch.Tensor | None = None) -> torch.Tensor:
    """[R, gamma] float32 prefix survival of confidence [R, gamma]; 0 at and beyond `draft_lens` [R] where given.

    Confidences are clamped to 0..1, NaN to 0, so a broken drafter costs only speed.
    """
    if confidence.device.type != "cpu":
        return survival_torch(confidence, draft_lens)
    clamped = np.fmax(confidence.float().numpy(), 0.0)  # numpy has less to do before it begins
    np.fmin(clamped, 1.0, out=clamped)
    survival = torch.from_numpy(clamped).cumprod_(1)
    if draft_lens is not None and np.count_nonzero(draft_lens.numpy() < clamped.shape[1]):
        clamped *= np.arange(clamped.shape[1]) < draft_lens.numpy()[:, None]
    return survival


def survival_torch(confidence: torch.Tensor, draft_lens: torch.Tensor | None = None) -> torch.Tensor:
    """`survival_of` on any device, without waiting for it."""
    # nan_to_num first: a clamp lets NaN through. cummin, because products in parallel round differently at each
    # position, and survival must not rise.
    survival = torch.nan_to_num(confidence.float(), nan=0.0).clamp_(0.0, 1.0).cumprod_(1).cummin(1).values
    if draft_lens is not None:
        survival *= torch.arange(survival.shape[1], device=survival.device) < draft_lens[:, None]
    return survival


def top_k(survival: torch.Tensor, tokens: int | None, first: np.ndarray | None = None) -> torch.Tensor:
    """verify_lens [R] int64: the `tokens` largest entries of survival [R, gamma] (None: no bound) that are above 0.

    first: [R] bool, requests that are served before the rest. On the survival's device, without waiting for it.
    """
    if first is not None:
        ahead = upload(np.where(first, np.float32(FIRST), np.float32(1.0)), survival.device)
        survival = survival * ahead[:, None]
    admitted = survival > 0
    if tokens is not None and tokens < survival.numel():
        order = survival.flatten().sort(descending=True, stable=True).indices
        ranks = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        admitted &= ranks.view_as(admitted) < tokens
    return admitted.sum(1)


def at_least(survival: torch.Tensor, bounds: np.ndarray) -> torch.Tensor:
    """survival [R, gamma], set to 0 from the first position on that is below its bound.

    bounds: above 0, of a shape that broadcasts to the survival's. On the survival's device, without waiting for it.
    Whether x_{r,k} stays depends on c_{r,1..k} only.
    """
    return survival * (survival >= upload(bounds.astype(np.float32), survival.device)).cumprod(1)
