"""Draft layers with fused projections (DFlash; DSpark, equations 2 and 3). They are Qwen3-shaped; without the norms of
queries and keys they are Llama-shaped."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..config_file import LayerShape
from .choosing import Convolution
from .config import BlockConfig


class Rotary(nn.Module):
    """Rotary position table of `max_positions` rows, halves rotated against each other (neox style)."""

    table: torch.Tensor

    def __init__(self, config: LayerShape) -> None:
        super().__init__()
        inverse, scale = frequencies(config)
        angles = torch.outer(torch.arange(config.max_positions, dtype=torch.float32), inverse)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self.register_buffer("table", torch.cat([cos, cos, -sin, sin], -1), persistent=False)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, signed sin), each [N, 1, D], of positions [N]."""
        cos, sin = self.table[positions].unsqueeze(1).chunk(2, -1)
        return cos, sin


def frequencies(config: LayerShape) -> tuple[torch.Tensor, float]:
    """Return the angles [D / 2] between neighbouring positions, and the factor of sines and cosines."""
    dim = config.head_dim
    if not config.rope:
        return config.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim), 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_config = Qwen3Config(
        head_dim=dim, hidden_size=config.hidden_size, num_attention_heads=config.num_heads,
        max_position_embeddings=config.max_positions, rope_parameters=config.rope | {"rope_theta": config.rope_theta},
    )  # fmt: skip
    made_on = torch.get_default_device()
    with torch.device("cpu"):
        inverse, scale = ROPE_INIT_FUNCTIONS[config.rope["rope_type"]](rope_config, torch.device("cpu"))
    return inverse.float().to(made_on), float(scale)


def rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply `Rotary.rows` to x [N, H, D]."""
    cos, sin = rope
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class RowConvolution(nn.Module):
    """DFlash 2's convolution over the rows of each block, before and after a sublayer. A row's kernels are
    `base_kernel` [2, taps, d] plus a term from its input, one number for each group of channels."""

    def __init__(self, size: int, shape: Convolution) -> None:
        super().__init__()
        self.taps, self.groups = shape.taps, size // shape.group
        self.base_kernel = nn.Parameter(torch.zeros(2, shape.taps, size))
        self.kernel_projection = nn.Linear(size, 2 * shape.taps * self.groups, bias=False)
        with torch.no_grad():  # training begins with each row as it is
            self.base_kernel[:, 0] = 1
            self.kernel_projection.weight.zero_()

    def forward(self, x: torch.Tensor, given: torch.Tensor, rows: int, side: int) -> torch.Tensor:
        """Convolve x [N, d], blocks of `rows` rows, by kernels from the sublayer's input `given` [N, d]. side: 0 for
        that input itself, 1 for the sublayer's output."""
        weight = self.kernel_projection.weight.view(2, -1, x.shape[1])[side]
        added = F.linear(given, weight).view(-1, rows, self.taps, self.groups, 1)
        kernels = self.base_kernel[side].view(self.taps, self.groups, -1) + added
        blocks = x.view(-1, rows, self.groups, x.shape[1] // self.groups)
        out = kernels[:, :, 0] * blocks
        for tap in range(1, min(self.taps, rows)):
            out[:, tap:] += kernels[:, tap:, tap] * blocks[:, :-tap]
        return out.view_as(x)


class DraftLayer(nn.Module):
    """One decoder layer; attention itself is the caller's, since training and serving hold keys differently. In the
    methods below, `rows` is the number of rows of a block; only a convolution reads it."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, dim
        self.input_layernorm = nn.RMSNorm(size, config.rms_norm_eps)
        self.qkv = nn.Linear(size, (self.heads + 2 * self.kv_heads) * dim, bias=False)
        self.q_norm: Any = nn.RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm: Any = nn.RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.o_proj = nn.Linear(self.heads * dim, size, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(size, config.rms_norm_eps)
        self.gate_up = nn.Linear(size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, size, bias=False)
        convolved = config.convolution
        self.attention_conv = None if convolved is None else RowConvolution(size, convolved)
        self.mlp_conv = None if convolved is None else RowConvolution(size, convolved)

    def context_kv(
        self, context: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [N, Hkv, D] of projected target features [N, d]; these skip the input norm."""
        kv = self.projected_context(context)
        k, v = kv.view(-1, 2, self.kv_heads, self.dim).unbind(1)
        return rotate(self.k_norm(k), rope), v

    def projected_context(self, context: torch.Tensor) -> torch.Tensor:
        """Return the same [N, 2 Hkv D] before norms and rotation."""
        return F.linear(context, self.qkv.weight[self.heads * self.dim :])

    def block_qkv(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], rows: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q [N, Hq, D], k and v [N, Hkv, D] of block inputs x [N, d]."""
        qkv = self.projected(x, rows).view(-1, self.heads + 2 * self.kv_heads, self.dim)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        return rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope), v

    def projected(self, x: torch.Tensor, rows: int = 0) -> torch.Tensor:
        """Return the same [N, (Hq + 2 Hkv) D] before norms and rotation."""
        x = self.input_layernorm(x)
        if self.attention_conv is not None:
            x = self.attention_conv(x, x, rows, 0)
        projected: torch.Tensor = self.qkv(x)
        return projected

    def finish(self, x: torch.Tensor, attended: torch.Tensor, rows: int = 0) -> torch.Tensor:
        """Return the layer's output [N, d] from its input and the attention output [N, Hq, D]."""
        out = self.o_proj(attended.reshape(x.shape[0], -1))
        if self.attention_conv is not None:
            out = self.attention_conv(out, self.input_layernorm(x), rows, 1)
        x = x + out
        normed = inner = self.post_attention_layernorm(x)
        if self.mlp_conv is not None:
            inner = self.mlp_conv(normed, normed, rows, 0)
        gate, up = self.gate_up(inner).chunk(2, -1)
        out = self.down_proj(F.silu(gate) * up)
        if self.mlp_conv is not None:
            out = self.mlp_conv(out, normed, rows, 1)
        return x + out
