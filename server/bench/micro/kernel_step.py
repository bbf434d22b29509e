"""A whole decode step on the kernels alone: no engine, no scheduler, no Python but a loop over layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.kernels import attention, fused, linear, sampling
from outrider.kernels.flat_batch import FlatBatch


@dataclass(frozen=True, slots=True)
class Shape:
    """Shapes of the model that is timed; the defaults are SmolLM2-135M."""

    hidden: int = 576
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    mlp: int = 1536
    vocab: int = 49_152
    layers: int = 30

    @property
    def split(self) -> list[int]:
        return [self.heads, self.kv_heads, self.kv_heads]

    @property
    def weights(self) -> list[tuple[int, int]]:
        """[outputs, depth] of one layer's products."""
        attended = self.heads * self.head_dim
        qkv = sum(self.split) * self.head_dim
        return [(qkv, self.hidden), (self.hidden, attended), (2 * self.mlp, self.hidden), (self.hidden, self.mlp)]


@dataclass(frozen=True, slots=True)
class Operations:
    """Parts of a step: PLAIN is torch alone, OURS the compiled kernels."""

    prepare: Callable
    multiply: Callable
    attend: Callable
    add_norm: Callable
    silu_mul: Callable
    rope_write: Callable
    argmax: Callable


PLAIN = Operations(
    lambda weight: weight,
    torch.nn.functional.linear,
    attention.torch_attention,
    fused.reference_add_rms_norm,
    fused.reference_silu_mul,
    fused.reference_rope_write,
    lambda logits: logits.argmax(-1),
)
OURS = Operations(
    linear.pack,
    linear.packed_linear,
    attention.flat_attention,
    fused.add_rms_norm,
    fused.silu_mul,
    fused.rope_write,
    sampling.argmax,
)


class Model:
    """Random weights and a random cache; only its time means anything."""

    def __init__(self, shape: Shape, dtype: torch.dtype, use: Operations):
        self.shape, self.use, self.dtype = shape, use, dtype
        weigh = lambda size: use.prepare((torch.randn(size) * 0.03).to(dtype))  # noqa: E731
        self.layers = [[weigh(size) for size in shape.weights] for _ in range(shape.layers)]
        self.head = weigh((shape.vocab, shape.hidden))
        self.scale = torch.ones(shape.hidden, dtype=dtype)
        self.angles = torch.randn(8192, shape.head_dim)

    def step(self, requests: int, tokens: int, context: int) -> Callable[[], torch.Tensor]:
        """A step of `requests` × `tokens` queries, the last of `context` positions each."""
        shape, slots = self.shape, torch.randperm(requests * context).int().view(requests, context)
        indptr = torch.arange(0, requests * tokens + 1, tokens).int()
        batch = FlatBatch(indptr, torch.full((requests,), context).int(), torch.arange(requests), slots)
        pool_size = (shape.layers, 2, requests * context, shape.kv_heads, shape.head_dim)
        pools = torch.randn(pool_size).to(self.dtype)
        new = slots[:, context - tokens :].reshape(-1).long()
        x = torch.randn(requests * tokens, shape.hidden).to(self.dtype)
        return lambda: self._forward(x, batch, pools, new)

    def _forward(self, x: torch.Tensor, batch: FlatBatch, pools: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        use, scale, residual = self.use, self.scale, torch.zeros_like(x)
        for (qkv_weight, out_weight, up_weight, down_weight), (keys, values) in zip(self.layers, pools, strict=True):
            normed = use.add_norm(x, residual, scale, 1e-5)
            qkv = use.multiply(normed, qkv_weight).view(x.shape[0], -1, self.shape.head_dim)
            q, k, v = qkv.split(self.shape.split, dim=1)
            use.rope_write(q, k, v, batch.positions, self.angles, keys, values, slots)
            attended = use.attend(q, keys, values, batch, scale=self.shape.head_dim**-0.5)
            x = use.multiply(attended.flatten(1), out_weight)
            normed = use.add_norm(x, residual, scale, 1e-5)
            x = use.multiply(use.silu_mul(use.multiply(normed, up_weight)), down_weight)
        return use.argmax(use.multiply(use.add_norm(x, residual, scale, 1e-5), self.head))
