"""Tiny random models of the served families (`server/model/families.py`), as folders."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf_models import EXPERTS, GEMMA_3, HEADS, WIDTH, WINDOW, Model, drawn
from safetensors.torch import load_file, save_file
from small_target import VOCAB, write_tokenizer
from transformers import AutoModelForImageTextToText, PreTrainedModel

EVEN = WIDTH // HEADS
"""The head size of models that have no field for it."""
ALL_HEADS = {"num_key_value_heads": HEADS, "head_dim": EVEN}
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
TIED = {"tie_word_embeddings": True}
SLIDING = {"sliding_window": WINDOW}
EVERY_OTHER = SLIDING | {"layer_types": ["sliding_attention", "full_attention"] * 2}
BY_KIND = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
SCALED = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
OLD = {
    "n_embd": WIDTH, "n_head": HEADS, "n_layer": 4, "n_positions": 512, "n_inner": 96, "head_dim": EVEN,
    "num_key_value_heads": HEADS, "tie_word_embeddings": True, "hidden_size": WIDTH, "num_attention_heads": HEADS,
}  # fmt: skip
GRANITE = {
    "attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
    "head_dim": EVEN, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
}  # fmt: skip
MOE = {
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip

HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
THREE_POSITIONS = {
    "rope_parameters": HYBRID["rope_parameters"] | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
}  # fmt: skip
HYBRID_MOE = HYBRID | {
    "num_experts": EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip

PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}}
EXPERTS_AS_MLP = {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
SHARED = MOE | {"num_shared_experts": 1, "n_shared_experts": 1}
THREE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [4, 6, 6]}}
THREE_PARTIAL = {"rope_parameters": PARTIAL["rope_parameters"] | {"mrope_section": [2, 3, 3]}}
ALPHA = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 1.0, "alpha": 100.0}}
GRANITE_SWA = EVERY_OTHER | {"layer_rope_theta": [500.0, 5000.0] * 2}
PER_LAYER = {
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2,
    "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA_3N = EVERY_OTHER | TIED | PER_LAYER | {
    "rope_parameters": BY_KIND, "altup_num_inputs": 2, "laurel_rank": 8,
    "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
}  # fmt: skip
GEMMA_4 = EVERY_OTHER | TIED | PER_LAYER | {
    "head_dim": 16, "global_head_dim": 32, "use_double_wide_mlp": True,
    "rope_parameters": BY_KIND | {
        "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}
    },
}  # fmt: skip

LLAMA_4 = {
    "attention_chunk_size": WINDOW, "floor_scale": 8, "attn_scale": 0.3, "num_local_experts": EXPERTS,
    "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "intermediate_size": 32, "intermediate_size_mlp": 96,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", {}),
    "Llama4ForCausalLM": ("Llama4TextConfig", LLAMA_4),
    "Llama4ForConditionalGeneration": ("Llama4TextConfig", LLAMA_4),
    "MistralForCausalLM": ("MistralConfig", SLIDING),
    "Ministral3ForCausalLM": ("Ministral3Config", {"sliding_window": None, "rope_parameters": SCALED}),
    "MixtralForCausalLM": ("MixtralConfig", SLIDING | MOE | {"head_dim": EVEN}),
    "Qwen2ForCausalLM": ("Qwen2Config", TWO_HEADS),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", {"head_dim": EVEN} | MOE),
    "Qwen3ForCausalLM": ("Qwen3Config", {}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", MOE),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", HYBRID_MOE),
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", HYBRID | THREE_POSITIONS),
    "Qwen3_5ForConditionalGeneration": ("Qwen3_5TextConfig", HYBRID | THREE_POSITIONS | TIED),
    "Qwen3_5MoeForCausalLM": ("Qwen3_5MoeTextConfig", HYBRID_MOE),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5MoeTextConfig", HYBRID_MOE | THREE_POSITIONS),
    "Gemma2ForCausalLM": ("Gemma2Config", EVERY_OTHER | TIED | {"hidden_act": "gelu_pytorch_tanh"}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", GEMMA_3),
    "Phi3ForCausalLM": ("Phi3Config", SLIDING | TWO_HEADS),
    "OlmoForCausalLM": ("OlmoConfig", ALL_HEADS),
    "OlmoeForCausalLM": ("OlmoeConfig", ALL_HEADS | MOE),
    "Olmo2ForCausalLM": ("Olmo2Config", {"head_dim": EVEN}),
    "Olmo3ForCausalLM": (
        "Olmo3Config",
        EVERY_OTHER | {"head_dim": EVEN, "rope_parameters": dict.fromkeys(BY_KIND, BY_KIND["full_attention"])},
    ),
    "GraniteForCausalLM": ("GraniteConfig", GRANITE),
    "GraniteMoeForCausalLM": ("GraniteMoeConfig", GRANITE),
    "GraniteMoeSharedForCausalLM": ("GraniteMoeSharedConfig", GRANITE),
    "GptOssForCausalLM": ("GptOssConfig", EVERY_OTHER | MOE | {"intermediate_size": 64}),
    "SmolLM3ForCausalLM": ("SmolLM3Config", TIED | {"head_dim": EVEN}),
    "Glm4ForCausalLM": ("Glm4Config", {}),
    "Glm4MoeForCausalLM": ("Glm4MoeConfig", MOE),
    "CohereForCausalLM": ("CohereConfig", TIED | {"head_dim": EVEN}),
    "Cohere2ForCausalLM": ("Cohere2Config", EVERY_OTHER | TIED | {"head_dim": EVEN}),
    "Starcoder2ForCausalLM": ("Starcoder2Config", SLIDING | {"head_dim": EVEN}),
    "StableLmForCausalLM": ("StableLmConfig", {"head_dim": EVEN}),
    "ArceeForCausalLM": ("ArceeConfig", {"head_dim": EVEN}),
    "SeedOssForCausalLM": ("SeedOssConfig", {}),
    "LagunaForCausalLM": ("LagunaConfig", EVERY_OTHER | MOE | {"rope_parameters": BY_KIND}),
    "MellumForCausalLM": ("MellumConfig", EVERY_OTHER | MOE | {"rope_parameters": BY_KIND}),
    "PersimmonForCausalLM": ("PersimmonConfig", ALL_HEADS),
    "OPTForCausalLM": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": WIDTH} | ALL_HEADS),
    "GPT2LMHeadModel": ("GPT2Config", OLD),
    "GPTBigCodeForCausalLM": ("GPTBigCodeConfig", OLD),
    "ApertusForCausalLM": ("ApertusConfig", {"hidden_act": "xielu", "head_dim": EVEN}),
    "AfmoeForCausalLM": (
        "AfmoeConfig",
        EVERY_OTHER | SHARED | {"num_dense_layers": 1, "route_scale": 1.5, "mup_enabled": True},
    ),
    "Cohere2MoeForCausalLM": (
        "Cohere2MoeConfig",
        EVERY_OTHER
        | TIED
        | EXPERTS_AS_MLP
        | {"mlp_layer_types": ["dense"] + ["sparse"] * 3, "logit_scale": 0.25}
        | {"num_shared_experts": 1, "prefix_dense_intermediate_size": 64},
    ),
    "Dots1ForCausalLM": ("Dots1Config", SHARED | {"sliding_window": None, "head_dim": EVEN}),
    "Ernie4_5ForCausalLM": ("Ernie4_5Config", TIED),
    "Ernie4_5_ForCausalLM": ("Ernie4_5Config", TIED),
    "Ernie4_5_MoeForCausalLM": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": EXPERTS, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1}
        | {"head_dim": EVEN, "tie_word_embeddings": True},
    ),
    "Exaone4ForCausalLM": ("Exaone4Config", EVERY_OTHER),
    "ExaoneMoEForCausalLM": ("ExaoneMoeConfig", EVERY_OTHER | SHARED),
    "ExaoneMoeForCausalLM": ("ExaoneMoeConfig", EVERY_OTHER | SHARED),
    "GPTJForCausalLM": ("GPTJConfig", OLD | {"rotary_dim": 8, "tie_word_embeddings": False}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", ALL_HEADS | PARTIAL),
    "GemmaForCausalLM": ("GemmaConfig", TIED | {"hidden_act": "gelu_pytorch_tanh"}),
    "Gemma3ForConditionalGeneration": ("Gemma3TextConfig", GEMMA_3),
    "Gemma3nForCausalLM": ("Gemma3nTextConfig", GEMMA_3N),
    "Gemma3nForConditionalGeneration": ("Gemma3nTextConfig", GEMMA_3N),
    "Gemma4ForCausalLM": ("Gemma4TextConfig", GEMMA_4),
    "Gemma4ForConditionalGeneration": ("Gemma4TextConfig", GEMMA_4),
    "Glm4vForConditionalGeneration": (
        "Glm4vConfig",
        {"head_dim": EVEN, "rope_parameters": PARTIAL["rope_parameters"] | {"mrope_section": [1, 1, 2]}},
    ),
    "Glm4vMoeForConditionalGeneration": ("Glm4vMoeConfig", THREE_PARTIAL | MOE | {"n_shared_experts": 1}),
    "GlmForCausalLM": ("GlmConfig", PARTIAL),
    "GraniteMoeHybridForCausalLM": (
        "GraniteMoeHybridConfig",
        GRANITE | {"layer_types": ["attention"] * 4, "position_embedding_type": "rope"},
    ),
    "GraniteMoeSWAForCausalLM": ("GraniteMoeSWAConfig", GRANITE | GRANITE_SWA),
    "GraniteSWAForCausalLM": ("GraniteSWAConfig", GRANITE | GRANITE_SWA),
    "HYV3ForCausalLM": ("HYV3Config", SHARED),
    "HunYuanDenseV1ForCausalLM": ("HunYuanDenseV1Config", ALPHA | {"use_qk_norm": True}),
    "HunYuanMoEV1ForCausalLM": (
        "HunYuanMoEV1Config",
        ALPHA
        | {"num_experts": EXPERTS, "moe_topk": 2, "moe_intermediate_size": 96, "num_shared_expert": 1}
        | {"use_qk_norm": True, "use_mixed_mlp_moe": True},
    ),
    "MiniMaxM2ForCausalLM": ("MiniMaxM2Config", EXPERTS_AS_MLP | PARTIAL),
    "Mistral3ForConditionalGeneration": ("Ministral3Config", {"sliding_window": None, "rope_parameters": SCALED}),
    "PhiForCausalLM": ("PhiConfig", ALL_HEADS | PARTIAL | {"intermediate_size": 4 * WIDTH}),
    "PhiMoEForCausalLM": (
        "PhimoeConfig",
        EXPERTS_AS_MLP | {"head_dim": EVEN, "lm_head_bias": True, "attention_bias": True},
    ),
    "Qwen2VLForConditionalGeneration": ("Qwen2VLConfig", THREE | TWO_HEADS | TIED),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2_5_VLConfig", THREE | TWO_HEADS),
    "Qwen3VLForConditionalGeneration": ("Qwen3VLConfig", THREE | TIED),
    "Qwen3VLMoeForConditionalGeneration": ("Qwen3VLMoeConfig", THREE | MOE | {"moe_intermediate_size": 48}),
}
"""Architecture -> its configuration class, and fields besides those of `gguf_models.Model`."""
IN_ONE_CALL = ("LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
IN_ONE_CALL += ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
IN_ONE_CALL += ("Qwen3VLForConditionalGeneration",)
"""Models with all layers in one call (`server/plugin/cpu/fused_model.py`)."""
VISION: dict[str, Mapping[str, Any]] = {
    "Glm4vForConditionalGeneration": {"depth": 1, "num_heads": 2, "out_hidden_size": WIDTH, "intermediate_size": 16},
    "Qwen2VLForConditionalGeneration": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": WIDTH},
    "Qwen2_5_VLForConditionalGeneration": {
        "depth": 1, "num_heads": 2, "out_hidden_size": WIDTH, "intermediate_size": 16, "fullatt_block_indexes": [0],
    },
    "Qwen3VLForConditionalGeneration": {
        "depth": 1, "num_heads": 2, "out_hidden_size": WIDTH, "intermediate_size": 16, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}  # fmt: skip
VISION |= {
    f"{name}MoeForConditionalGeneration": VISION[f"{name}ForConditionalGeneration"] for name in ("Glm4v", "Qwen3VL")
}
"""Architectures that are compared with the whole model -> fields of its image part."""


def write(architecture: str, folder: Path) -> PreTrainedModel:
    """Write the model, in float32, and a tokenizer into the folder."""
    config_class, fields = FAMILIES[architecture]
    plan = Model(config_class, "", {"vocab_size": VOCAB, **fields})
    model = whole(plan, VISION[architecture]) if architecture in VISION else plan.build()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    if architecture.endswith("ForConditionalGeneration") and architecture not in VISION:
        _add_images(folder, architecture)
    if architecture != type(model).__name__:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    return model


def whole(plan: Model, vision: Mapping[str, Any], **tokens: int) -> PreTrainedModel:
    """A model with an image part. Fields are of the text part. tokens: ids related to images."""
    shape = plan.shape()
    config = getattr(transformers, plan.config_class)(
        text_config=shape,
        vision_config={"hidden_size": 16, **vision},
        tie_word_embeddings=shape["tie_word_embeddings"],
        **tokens,
    )
    return drawn(AutoModelForImageTextToText.from_config(config, dtype=torch.float32))


def _add_images(folder: Path, architecture: str) -> None:
    """Turn a text model's folder into one with image parts, which are not written."""
    text = json.loads((folder / "config.json").read_text())
    kind = "mistral3" if architecture.startswith("Mistral3") else text["model_type"].removesuffix("_text")
    whole = {"architectures": [architecture], "model_type": kind}
    whole |= {"text_config": text, "vision_config": {}, "tie_word_embeddings": text["tie_word_embeddings"]}
    if kind == "mistral3":
        del whole["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(whole))
    named = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        named[name.replace("model.", "model.language_model.", 1)] = weight
    named["model.visual.patch_embed.proj.bias"] = torch.zeros(8)
    save_file(named, folder / "model.safetensors")
