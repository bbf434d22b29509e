"""Tiny random MTP layers in published layouts, and their reference.

Transformers ignores MTP layers, but has the decoder layer in them. The reference is a model of that layer, with the
joined rows as embeddings and the MTP layer's final norm.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

VOCAB, WIDTH, LAYERS, EXPERTS = 96, 32, 6, 8
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
MOE = {"num_experts_per_tok": 3, "moe_intermediate_size": 32}
QWEN_MOE = MOE | {"num_experts": EXPERTS, "shared_expert_intermediate_size": 32}
GLM = MOE | {
    "n_routed_experts": EXPERTS, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
    "attention_bias": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
LAYOUTS: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    # Qwen/Qwen3-Next-80B-A3B-Instruct
    "qwen3-next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", ROPE | QWEN_MOE | {"norm_topk_prob": True}),
    # Qwen/Qwen3.5-27B, Qwen/Qwen3.5-35B-A3B: the text's shape is a section
    "qwen3.5": ("Qwen3_5ForConditionalGeneration", "Qwen3_5TextConfig", ROPE),
    "qwen3.5 with experts": ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeTextConfig", ROPE | QWEN_MOE),
    # zai-org/GLM-4.5-Air; zai-org/GLM-4.5 with norms of queries and keys; experts in groups, as DeepSeek's
    "glm-4.5-air": ("Glm4MoeForCausalLM", "Glm4MoeConfig", ROPE | GLM),
    "glm-4.5": ("Glm4MoeForCausalLM", "Glm4MoeConfig", ROPE | GLM | {"use_qk_norm": True}),
    "glm with groups": ("Glm4MoeForCausalLM", "Glm4MoeConfig", ROPE | GLM | {"n_group": 4, "topk_group": 2}),
    # The compiled kernels need heads of 32 numbers.
    "wide": (
        "Qwen3NextForCausalLM", "Qwen3NextConfig",
        ROPE | QWEN_MOE | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64},
    ),
}  # fmt: skip
JOINED = "qwen3.5 with experts"
"""Its experts are stored jointly."""
FIELDS = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
FIELDS += ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Fields of a config in which a target and its layer agree."""
GLM_NAMES = {"fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"}
QWEN_NAMES = {"embedding_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden"}


def width_of(layout: str) -> int:
    return int((SHAPE | LAYOUTS[layout][2])["hidden_size"])


def layer_model(layout: str, seed: int = 0, **changes: Any) -> Any:
    """The layer as a Transformers model, with random weights large enough to matter."""
    fields = SHAPE | LAYOUTS[layout][2] | changes
    alone = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "first_k_dense_replace": 0}
    config = getattr(transformers, LAYOUTS[layout][1])(**fields | alone, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if "inv_freq" not in name:
                value.copy_(torch.randn(value.shape, generator=draw) * 0.3 + around(name, layout))
    return model


def around(name: str, layout: str) -> float:
    """The mean of a weight's numbers: Qwen stores norms less 1."""
    return float("norm" in name and layout.startswith("glm"))


def joint(layout: str, seed: int = 0, size: int = 0) -> dict[str, torch.Tensor]:
    """The MTP layer's own tensors, by our names. size: width of the target; 0: the layout's."""
    draw, size = torch.Generator().manual_seed(100 + seed), size or width_of(layout)
    shapes = {"fc": (size, 2 * size), "embedding_norm": (size,), "hidden_norm": (size,)}
    return {name: torch.randn(shape, generator=draw) * 0.3 + around(name, layout) for name, shape in shapes.items()}


def published(
    layout: str, model: Any, own: Mapping[str, torch.Tensor], layers: int = LAYERS
) -> dict[str, torch.Tensor]:
    """Names and tensors of a checkpoint. model: from `layer_model`. own: from `joint`. layers: the target's."""
    glm = layout.startswith("glm")
    prefix, names = (f"model.layers.{layers}.", GLM_NAMES) if glm else ("mtp.", QWEN_NAMES)
    layer = prefix if glm else f"{prefix}layers.0."
    tensors = {f"{prefix}{names.get(name, name)}.weight": value for name, value in own.items()}
    for name, value in model.state_dict().items():
        name = name.removeprefix("model.")
        if name == "norm.weight":
            tensors[f"{prefix}{names.get('norm', 'norm')}.weight"] = value
        elif name.startswith("layers.0.mlp.experts.") and layout != JOINED:
            for i, part in enumerate(value):
                parts = part.chunk(2) if "gate_up" in name else [part]
                kinds = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
                for kind, rows in zip(kinds, parts, strict=True):
                    tensors[f"{layer}mlp.experts.{i}.{kind}.weight"] = rows
        elif name.startswith("layers.0."):
            tensors[layer + name.removeprefix("layers.0.")] = value
    if glm:  # the target's, again
        for name in ("embed_tokens", "shared_head.head"):
            tensors[f"{prefix}{name}.weight"] = torch.zeros(model.config.vocab_size, model.config.hidden_size)
    return {name: value.clone().contiguous() for name, value in tensors.items()}


def save_mtp(folder: Path, layout: str = "qwen3-next", seed: int = 0, **changes: Any) -> Path:
    """Write a target's folder with only the MTP layer."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {**SHAPE, **LAYOUTS[layout][2], **changes, "num_hidden_layers": LAYERS}
    if LAYOUTS[layout][0].endswith("ForConditionalGeneration"):
        config = {"text_config": config}
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [LAYOUTS[layout][0]]}))
    tensors = published(layout, layer_model(layout, seed, **changes), joint(layout, seed))
    save_file(tensors | {"model.layers.0.mlp.up_proj.weight": torch.zeros(2)}, folder / "model.safetensors")
    return folder


def add_mtp(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Add an MTP layer in a separate file, as Qwen does."""
    (file,) = folder.glob("*.safetensors")
    save_file(dict(tensors), folder / "mtp.safetensors")
    names = dict.fromkeys(load_file(file), file.name) | dict.fromkeys(tensors, "mtp.safetensors")
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class Reference:
    """A chain by Transformers' layer, one request and one token at a time, without a cache."""

    def __init__(self, layout: str, embedding: torch.Tensor, head: torch.Tensor, seed: int = 0):
        self.model, self.own = layer_model(layout, seed), joint(layout, seed)
        self.embedding, self.head = embedding, head

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        norm = type(self.model.model.norm)(x.shape[-1], eps=1e-6)
        norm.weight.data = self.own[name]
        return norm(x)

    @torch.inference_mode()
    def draft(self, text: list[int], hidden: torch.Tensor, gamma: int) -> tuple[list[int], list[torch.Tensor]]:
        """gamma greedy tokens and their logits after a text with an unread last token.

        hidden: [n, d] of all tokens but the last.
        """
        rows, drafted, logits = list(text[1:]), [], []
        for _ in range(gamma):
            pair = self.norm(self.embedding[rows], "embedding_norm"), self.norm(hidden, "hidden_norm")
            joined = torch.cat(pair, -1) @ self.own["fc"].T
            out = self.model.model(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0, -1]
            logits.append(self.head @ out)
            drafted.append(int(logits[-1].argmax()))
            rows.append(drafted[-1])
            hidden = torch.cat([hidden, out[None]])
        return drafted, logits
