"""Draft layers of Gemma 4's shape, of DSpark drafters for Gemma targets.

Attention and MLP have norms before and after them, values are normed, and keys before norm and rotation may serve as
values. Attention is not scaled, and the output of a layer is multiplied by a learned scalar.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .config import BlockConfig
from .layers import DraftLayer, rotate


class GemmaLayer(DraftLayer):
    """One decoder layer; attention is the caller's, as in `DraftLayer`."""

    layer_scalar: torch.Tensor

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        size, self.shared_kv = config.hidden_size, config.shared_kv
        if self.shared_kv:
            self.qkv = nn.Linear(size, (self.heads + self.kv_heads) * self.dim, bias=False)
        self.pre_feedforward_layernorm = nn.RMSNorm(size, config.rms_norm_eps)
        self.post_feedforward_layernorm = nn.RMSNorm(size, config.rms_norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def context_kv(
        self, context: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kv = F.linear(context, self.qkv.weight[self.heads * self.dim :])
        return self._keys_values(kv.view(len(context), -1, self.dim), rope)

    def block_qkv(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], rows: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv = self.qkv(self.input_layernorm(x)).view(len(x), -1, self.dim)
        return rotate(self.q_norm(qkv[:, : self.heads]), rope), *self._keys_values(qkv[:, self.heads :], rope)

    def _keys_values(
        self, kv: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = kv[:, : self.kv_heads], kv[:, -self.kv_heads :]
        return rotate(self.k_norm(k), rope), F.rms_norm(v, (self.dim,), eps=self.input_layernorm.eps)

    def finish(self, x: torch.Tensor, attended: torch.Tensor, rows: int = 0) -> torch.Tensor:
        x = x + self.post_attention_layernorm(self.o_proj(attended.reshape(len(x), -1)))
        gate, up = self.gate_up(self.pre_feedforward_layernorm(x)).chunk(2, -1)
        down = self.down_proj(F.gelu(gate, approximate="tanh") * up)
        return (x + self.post_feedforward_layernorm(down)) * self.layer_scalar
