"""A frozen projection with a trained low-rank delta, computed as one product.

y = x (W + B A)^T. The sum is made once per step, in the dtype that is served, so that training rounds as serving will;
a forward is then one product, and a backward one product and four thin ones.
"""

from __future__ import annotations

import torch
from torch import nn


class _MergedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, merged, a, b):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, merged, a, b)
        return x @ merged.T

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, merged, a, b = ctx.saved_tensors
        grad_x = grad @ merged if ctx.needs_input_grad[0] else None
        grad_a = (grad @ b).T @ x
        grad_b = ((x @ a.T).T @ grad).T
        return grad_x, None, grad_a, grad_b


class LowRankLinear(nn.Module):
    """weight: [out, in], frozen; a: [r, in] and b: [out, r], trained, b from 0. Call `merge` after every change."""

    merged: torch.Tensor

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        out, into = linear.weight.shape
        self.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
        self.a = nn.Parameter(torch.randn(rank, into) * into**-0.5)
        self.b = nn.Parameter(torch.zeros(out, rank))
        self.register_buffer("merged", self.weight.detach().clone(), persistent=False)

    @torch.no_grad()
    def merge(self) -> None:
        """Make the weights that the forward uses."""
        torch.addmm(self.weight, self.b, self.a, out=self.merged)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _MergedLinear.apply(x, self.merged, self.a, self.b)
        return out
