"""Llama 4's text on a CPU: SGLang's classes, without their parts for GPUs and for bfloat16 alone."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from outrider.kernels.pointwise import sigmoid

from .. import must_take

NAME = "Llama4ForCausalLM"
SHARDS = {"gate_up_proj": ("w13_weight", ("w1", "w3")), "down_proj": ("w2_weight", ("w2",))}
"""Weights of all experts of a layer: SGLang's name for them, and for their parts."""


def adapt(model_config: Any) -> None:
    """Change SGLang's classes for such a model, which it has imported to load it."""
    if NAME not in (model_config.hf_config.architectures or ()):
        return
    from sglang.srt.models import llama4
    from sglang.srt.models.registry import ModelRegistry

    must_take.replace(llama4.Llama4Attention, "forward", _attend)
    must_take.replace(llama4.Llama4MoE, "_forward_core", _experts)
    ModelRegistry.models[NAME] = _adapted(llama4.Llama4ForCausalLM)


def _attend(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any) -> torch.Tensor:
    """Do SGLang's `Llama4Attention.forward` in the model's own type, without compiling by torch."""
    qkv, _ = self.qkv_proj(hidden_states)
    q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], -1)
    if self.use_rope:
        q, k = self.rotary_emb(positions, q, k)
    if self.qk_norm is not None:
        q, k = (_of_length_one(x, self.head_dim, self.qk_norm.variance_epsilon) for x in (q, k))
    if self.attn_temperature_tuning and not self.use_rope:
        q = (q * self._get_attn_scale(positions)).to(q.dtype)
    out, _ = self.o_proj(self.attn(q, k, v, forward_batch))
    return out


def _of_length_one(x: torch.Tensor, width: int, eps: float) -> torch.Tensor:
    """Return x [N, H * width] with each head's numbers divided by the root of their mean square."""
    heads = x.unflatten(-1, (-1, width)).float()
    return (heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)).to(x.dtype).flatten(1)


def _experts(self: Any, hidden: torch.Tensor, forward_mode: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs of the shared expert and of each token's own; the latter's weight multiplies its input."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    logits, _ = self.router(hidden)
    best, chosen = logits.max(-1, keepdim=True)
    weighted = hidden * sigmoid(best.float()).to(hidden.dtype)
    routed = self.experts(weighted, StandardTopKOutput(torch.ones_like(best), chosen.int(), logits))
    return self.shared_expert(hidden), routed


def _adapted(model: type) -> type:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    class Llama4Text(model):  # type: ignore[misc]
        def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
            if config.num_experts_per_tok != 1:
                raise ValueError(f"Llama 4 with {config.num_experts_per_tok} experts for a token is not served")
            super().__init__(config, quant_config, prefix)
            for layer, rotates in zip(self.model.layers, config.no_rope_layers, strict=True):
                if layer.self_attn.use_rope != bool(rotates):
                    raise ValueError("Llama 4 without positions in other layers than every fourth is not served")
                layer.self_attn.attn.attention_chunk = config.attention_chunk_size if rotates else None
            for module in self.modules():
                if isinstance(module, FusedMoE):
                    module.moe_runner_config.apply_router_weight_on_input = False  # see `_experts`

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            parameters = dict(self.named_parameters())

            def others() -> Iterator[tuple[str, torch.Tensor]]:
                for name, weight in weights:
                    layer, _, product = name.rpartition(".experts.")
                    if product in SHARDS:
                        _load_experts(parameters, f"{layer}.experts", product, weight)
                    elif name.endswith(("q_proj.weight", "k_proj.weight")):
                        yield name, in_halves(weight, self.config.head_dim)
                    else:
                        yield name, weight

            return super().load_weights(others())

    return Llama4Text


def in_halves(weight: torch.Tensor, width: int) -> torch.Tensor:
    """Reorder rows [H * width, in] of queries or keys: numbers rotated together lie half a head apart, not side by
    side."""
    return weight.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).reshape(weight.shape)


def _load_experts(parameters: dict[str, Any], experts: str, product: str, weight: torch.Tensor) -> None:
    """Load weight [experts, in, out] of a layer."""
    stacked, shards = SHARDS[product]
    parameter = parameters[f"{experts}.{stacked}"]
    for part, shard in zip(weight.chunk(len(shards), -1), shards, strict=True):
        for expert, matrix in enumerate(part):
            parameter.weight_loader(parameter, matrix.T, f"{experts}.{stacked}", shard_id=shard, expert_id=expert)
