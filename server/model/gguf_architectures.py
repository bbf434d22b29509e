"""Architectures of GGUF files: names of their tensors, and the fields of config.json that only they have.

Names and order of rows follow llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .gguf_file import GgufFile

ATTENTION = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
}
QK_NORMS = {"attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"}
QKV_BIASES = {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"}
MLP = {
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
EXPERTS = {f"ffn_{part}_exps.weight": f"mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")}
"""Three-dimensional tensors; {} is the number of the expert."""
NORMS = {"attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight"}


def _nothing(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture that is served.

    model_class, model_type: in transformers and SGLang. layer: tensors of a layer by their names in the file.
    experts: those of them that hold a matrix for each expert. permuted: rows of queries and keys lie in pairs.
    config: further fields of config.json, from the file and the fields that all have.
    """

    model_class: str
    model_type: str
    layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    config: Callable[[GgufFile, Mapping[str, Any]], dict[str, Any]] = _nothing


def _granite(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": file.hyper("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": file.hyper("embedding_scale", 1.0),
        "residual_multiplier": file.hyper("residual_scale", 1.0),
        "logits_scaling": file.hyper("logit_scale", 1.0),
    }


def _smollm3(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"no_rope_layers": [int((i + 1) % 4 != 0) for i in range(config["num_hidden_layers"])]}


def _qwen3moe(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": file.hyper("expert_count"),
        "num_experts_per_tok": file.hyper("expert_used_count"),
        "moe_intermediate_size": file.hyper("expert_feed_forward_length"),
        "intermediate_size": file.hyper("feed_forward_length", file.hyper("expert_feed_forward_length")),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


PLAIN = NORMS | ATTENTION | MLP
SUPPORTED = {
    "llama": Architecture("LlamaForCausalLM", "llama", PLAIN, permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", PLAIN | QKV_BIASES),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", PLAIN | QK_NORMS),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        NORMS | ATTENTION | QK_NORMS | {"ffn_gate_inp.weight": "mlp.gate.weight"},
        experts=EXPERTS,
        config=_qwen3moe,
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", PLAIN, permuted=True, config=_smollm3),
    "granite": Architecture("GraniteForCausalLM", "granite", PLAIN, permuted=True, config=_granite),
}
"""The architectures that are served, by llama.cpp's names."""
