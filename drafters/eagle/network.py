"""The network of an EAGLE-3 head: its features are fused outputs of several layers of the target."""

import torch

from outrider.kernels.fused import add_rms_norm, silu_mul
from outrider.kernels.weights import multiply

from ..chain.network import ATTENTION, LAYER, ChainNetwork, ChainWeights, stacked
from ..spans import Spans


class EagleNetwork(ChainNetwork):
    """A head ready to compute; arguments as in `ChainNetwork`."""

    def __init__(self, weights: ChainWeights, head: torch.Tensor, positions: int):
        super().__init__(weights, head, positions, weights.config)
        tensors = weights.tensors
        self.input_norm = weights.get("input_norm.weight")
        self.fc_norms = [
            tensors[f"fc_norm.{i}.weight"] for i in range(len(weights.layers)) if "fc_norm.0.weight" in tensors
        ]
        self.hidden_norm, self.embedding_norm = (
            tensors[f"{LAYER}{name}.weight"] for name in ("hidden_norm", "input_layernorm")
        )
        self.qkv, self.kv = (stacked(weights, [f"{ATTENTION}{part}_proj" for part in parts]) for parts in ("qkv", "kv"))
        self.gate_up = stacked(weights, [f"{LAYER}mlp.{part}_proj" for part in ("gate", "up")])
        self.down = stacked(weights, [f"{LAYER}mlp.down_proj"])

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.to(self.dtype).contiguous()
        if self.input_norm is not None:
            x = self._normed(x, self.input_norm)
        if self.fc_norms:
            chunks = x.chunk(len(self.fc_norms), -1)
            x = torch.cat([self._normed(c.contiguous(), w) for c, w in zip(chunks, self.fc_norms, strict=True)], -1)
        return multiply(x, self.fc)

    def write(self, embedded: torch.Tensor, features: torch.Tensor, rows: Spans) -> None:
        self._write(multiply(torch.cat(self._inputs(embedded, features), -1), self.kv), rows)

    def step(self, embedded: torch.Tensor, features: torch.Tensor, rows: Spans) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        inputs = self._inputs(embedded, features)
        residual = inputs[1] if config.norm_before_residual else features.clone()
        attended = self._attend(multiply(torch.cat(inputs, -1), self.qkv), rows)
        x = add_rms_norm(multiply(attended, self.out), residual, self.mlp_norm, config.rms_norm_eps)
        x = multiply(silu_mul(multiply(x, self.gate_up)), self.down)
        normed = add_rms_norm(x, residual, self.norm, config.rms_norm_eps)
        return multiply(normed, self.head), normed if config.norm_output else residual

    def _inputs(self, embedded: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._normed(embedded, self.embedding_norm), self._normed(features, self.hidden_norm)
