"""Architectures of GGUF files: tensor names, and the fields of config.json that only one architecture has.

Names and order of rows follow llama.cpp's converter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from .gguf_file import GgufFile

GEMMA_3_27B_LAYERS = 62
"""llama.cpp tells the sizes of Gemma 3 apart by their layers."""

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
NORMS_AFTER = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
"""Norms of the outputs of attention and MLP, before these are added."""
NORMS_AROUND = NORMS_AFTER | {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
}
FUSED = {
    "attn_qkv.weight": "self_attn.qkv_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_up.weight": "mlp.gate_up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture that is served.

    model_class, model_type: in transformers and SGLang. layer: tensors of a layer by their names in the file.
    experts: tensors that hold a matrix for each expert. permuted: rows of queries and keys lie in pairs.
    norms_from_one: the file stores a norm's weight w as 1 + w.
    config: makes this architecture's further fields of config.json from the file and the common fields.
    """

    model_class: str
    model_type: str
    layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    norms_from_one: bool = False
    config: Callable[[GgufFile, Mapping[str, Any]], dict[str, Any]] = lambda file, config: {}


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


def _gemma3(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    layers, window = config["num_hidden_layers"], file.hyper("attention.sliding_window", 0)
    period = file.hyper("attention.sliding_window_pattern", 6) if window else 1
    # The largest model scales by this width, as the other sizes do, but its heads have another width.
    whole = config["hidden_size"] // config["num_attention_heads"]
    local = {"rope_type": "default", "rope_theta": file.hyper("rope.freq_base_swa", 10000.0)}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": whole if layers == GEMMA_3_27B_LAYERS else config["head_dim"],
        "sliding_window": window or config["max_position_embeddings"],
        # The last layer of each period attends to everything.
        "layer_types": ["sliding_attention" if i % period else "full_attention" for i in range(1, layers + 1)],
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "final_logit_softcapping": file.hyper("final_logit_softcapping", 0.0) or None,
        "attn_logit_softcapping": None,
    }


def _phi3(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    window = file.hyper("attention.sliding_window", 0)
    return {
        "sliding_window": window if 0 < window < config["max_position_embeddings"] else None,
        "partial_rotary_factor": config["rope_parameters"].get("partial_rotary_factor", 1.0),
        "original_max_position_embeddings": file.hyper(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
    }


def _olmo2(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    if file.hyper("attention.sliding_window", 0):
        raise UserError(f"{file.path}: OLMo 3's layers with a window are not supported from GGUF files")
    return {"attention_bias": False}


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
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        NORMS_AROUND | ATTENTION | QK_NORMS | MLP,
        norms_from_one=True,
        config=_gemma3,
    ),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", NORMS | FUSED, config=_phi3),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", NORMS_AFTER | ATTENTION | QK_NORMS | MLP, config=_olmo2),
}
"""The architectures that are served, by llama.cpp's names."""
