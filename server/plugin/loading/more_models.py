"""Models that SGLang does not have."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.models.llama import LlamaForCausalLM


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """A Llama some of whose layers rotate nothing (arXiv:2501.18795); SGLang 0.5.21 does not know it."""

    def __init__(self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        for layer, rotates in zip(self.model.layers, config.no_rope_layers, strict=False):
            if not rotates:
                layer.self_attn.rotary_emb = Unrotated()


class Unrotated(torch.nn.Module):
    """Rotary positions of a layer that has none."""

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return query, key


def register() -> None:
    """Make the models known to SGLang."""
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.models.setdefault("SmolLM3ForCausalLM", SmolLM3ForCausalLM)
