"""Norms in float32: sglang-kernel has them in 16 bits; in 32 only fused with the residual's addition."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def register() -> None:
    HookRegistry.register("sglang.srt.layers.layernorm.rmsnorm", rmsnorm, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.layernorm.gemma_rmsnorm", gemma_rmsnorm, HookType.AROUND)


def rmsnorm(original: Norm, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return torch's norm of rows [T, D] for float32, weighted by [D]; SGLang's for any other type."""
    return original(x, weight, eps) if x.dtype != torch.float32 else F.rms_norm(x, weight.shape, weight, eps)


def gemma_rmsnorm(original: Norm, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the same for weights stored as differences from 1."""
    return original(x, weight, eps) if x.dtype != torch.float32 else F.rms_norm(x, weight.shape, 1 + weight, eps)
