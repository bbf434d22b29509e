"""Elementwise functions in torch that round a number the same at any place of an array.

torch computes its `sigmoid`, `silu`, `gelu` and `softplus` in vectors, and the rest at the end of an array or of a
thread's share by other code. That may round differently, so a row would depend on its batch. Its exp, log1p, erf and
tanh have one code for all numbers. These functions use only them, in float32 at least, and round once to x's type.
"""

import math

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return (1 / (1 + torch.exp(-_wide(x)))).to(_type(x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return x sigmoid(x)."""
    wide = _wide(x)
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """Return x times the normal distribution function at x; `approximate`: "tanh" (arXiv:1606.08415) or "none"."""
    wide = _wide(x)
    if approximate == "tanh":
        slope = (wide * wide * 0.044715 + 1) * math.sqrt(2 / math.pi)
        twice = 1 + torch.tanh(wide * slope)
    else:
        twice = 1 + torch.erf(wide * math.sqrt(0.5))
    return (wide * 0.5 * twice).to(x.dtype)


def softplus(x: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
    """Return log(1 + exp(beta x)) / beta, and x where beta x is above the threshold."""
    wide = _wide(x)
    scaled = wide * beta
    return torch.where(scaled > threshold, wide, torch.log1p(torch.exp(scaled)) / beta).to(x.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 or x.is_complex() else x.float()


def _type(x: torch.Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() or x.is_complex() else torch.get_default_dtype()
