"""The operations between the matrix products of a layer, each in one pass over its rows.

On the CPU the compiled kernels do it (float32 inside, one rounding at the end); elsewhere, and where they are missing,
plain torch. A row's result never depends on the other rows.
"""

import math

import torch

from .cpu import native


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return weight * x / sqrt(mean(x**2) + eps) over the last dimension; x [..., H], weight [H]."""
    if x.is_contiguous() and x.shape[-1] % 16 == 0 and native.fits(x, weight):
        return torch.ops.outrider.rms_norm(x, None, weight, eps)
    return reference_rms_norm(x, weight, eps)


def reference_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Set `residual` to x + residual, in place; return its RMS norm, taken before `residual` is rounded."""
    dense = x.is_contiguous() and residual.is_contiguous() and x.shape == residual.shape
    if dense and x.shape[-1] % 16 == 0 and native.fits(x, residual, weight):
        return torch.ops.outrider.rms_norm(x, residual, weight, eps)
    wide = x.float() + residual.float()
    residual.copy_(wide)
    return reference_rms_norm(wide, weight, eps).to(x.dtype)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(x[..., :d]) * x[..., d:] for x [..., 2 * d]."""
    if x.is_contiguous() and x.shape[-1] % 32 == 0 and native.fits(x):
        return torch.ops.outrider.silu_mul(x)
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return gelu(x[..., :d]) * x[..., d:] with the tanh approximation (arXiv:1606.08415), for x [..., 2 * d].

    torch's own may round a number differently at another place in memory. gelu(g) = g * sigmoid(s) = silu(s) * g / s
    with s = c * g * (1 + a * g²); all but silu are products, sums and quotients, which have one rounding everywhere.
    """
    gate, up = x.float().chunk(2, dim=-1)
    slope = (gate * gate * 0.044715 + 1) * (2 * math.sqrt(2 / math.pi))
    return silu_mul(torch.cat([gate * slope, up / slope], dim=-1)).to(x.dtype)


def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate queries and keys in place by their positions (neox: halves, not neighbours).

    q: [N, Hq, D]. k: [N, Hkv, D]; views into a joint qkv are fine. positions: [N] int64.
    cos_sin: [positions, rotary_dim], cosines then sines; only the first rotary_dim <= D numbers of a head rotate.
    """
    if _rope_fits(q, k, cos_sin):
        torch.ops.outrider.rope(q, k, None, positions, cos_sin, None, None, None)
        return
    cos, sin = cos_sin[positions, None].float().chunk(2, dim=-1)
    for x in (q, k):
        a, b = x[..., : cos_sin.shape[1]].float().chunk(2, dim=-1)
        x[..., : cos_sin.shape[1]] = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def rope_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Do `rope`, then store keys and values at `slots` [N] int64 of the pools [S, Hkv, D] and [S, Hkv, Dv], in one
    pass."""
    if _rope_fits(q, k, cos_sin) and _heads_fit(v, k_pool, v_pool) and native.fits(k, v, k_pool, v_pool):
        torch.ops.outrider.rope(q, k, v, positions, cos_sin, k_pool, v_pool, slots)
    else:
        rope(q, k, positions, cos_sin)
        k_pool[slots], v_pool[slots] = k, v


def _rope_fits(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor) -> bool:
    angles = cos_sin.is_contiguous() and cos_sin.shape[1] % 32 == 0 and cos_sin.dtype in (torch.float32, q.dtype)
    return angles and _heads_fit(q, k) and native.fits(q, k)


def _heads_fit(*tensors: torch.Tensor) -> bool:
    """Return True for [tokens, heads, multiple of 16] with each token's heads side by side."""
    return all(x.shape[2] % 16 == 0 and x.stride()[1:] == (x.shape[2], 1) for x in tensors)
