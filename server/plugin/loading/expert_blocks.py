"""Mixtures of experts with each expert's weights in the file's blocks: a step reads only the chosen experts."""

from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase

from ..cpu.experts import activation_of, apply_experts
from .gguf_weights import GgufWeights

PARTS = ("gate_up_proj", "down_proj")
"""Products of an expert."""


class BlockExperts(FusedMoEMethodBase):
    """SGLang's layer of experts, with a product for each chosen expert over the rows that chose it."""

    apply = apply_experts

    def __init__(self, weights: GgufWeights, prefix: str) -> None:
        self.weights, self.prefix = weights, prefix

    def names(self, experts: int) -> list[str]:
        """Return the names of the file's weights that the layer holds."""
        layers = [f"{self.prefix}.{i}.{part}" for i in range(experts) for part in PARTS]
        return [name for layer in layers for name in self.weights.parts(layer)]

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        shapes = {"down_proj": [hidden_size, intermediate_size_per_partition]}
        for name in self.names(num_experts):
            expected = shapes.get(name.split(".")[-2], [intermediate_size_per_partition, hidden_size])
            if self.weights.stored[name].shape != expected:
                raise ValueError(f"{name} is {self.weights.stored[name].shape} in the file, {expected} by config.json")
        self.experts, self.dtype = num_experts, params_dtype

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        layer.between = activation_of(moe_runner_config)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed_experts = [
            tuple(self.weights.prepared(f"{self.prefix}.{i}.{part}", self.dtype) for part in PARTS)
            for i in range(self.experts)
        ]
