"""Tiny random EAGLE-3 folders in published layouts, for the target of `tiny_drafters`."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB, WIDTH, DRAFTED = 96, 32, 40
LAYER_IDS = [1, 3, 4]
"""Target layers with captured outputs."""

SHAPE: dict[str, Any] = {
    "attention_bias": False, "hidden_act": "silu", "hidden_size": WIDTH, "intermediate_size": 48,
    "num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "vocab_size": VOCAB, "tie_word_embeddings": False,
}  # fmt: skip

AUTHORS = SHAPE | {  # yuhuili/EAGLE3-LLaMA3.1-Instruct-8B; these layers are its default
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_scaling": None,
    "pretraining_tp": 1, "draft_vocab_size": DRAFTED, "eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYER_IDS},
}  # fmt: skip
SPECFORGE = AUTHORS | {  # SpecForge's for Qwen3
    "rope_theta": 1000000, "rms_norm_eps": 1e-6, "sliding_window": None, "use_sliding_window": False,
    "max_window_layers": 48, "fc_norm": True, "norm_output": True,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip
SPECULATORS: dict[str, Any] = {  # RedHatAI/Qwen3-8B-speculator.eagle3; a layer's input is the previous one's output
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": DRAFTED,
    "norm_before_residual": True, "target_hidden_size": None, "speculators_version": "0.3.0",
    "eagle_aux_hidden_state_layer_ids": [i + 1 for i in LAYER_IDS],
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "Qwen/Qwen3-8B"}},
    "transformer_layer_config": SHAPE | {
        "model_type": "qwen3", "rms_norm_eps": 1e-6, "attention_bias": True, "rope_theta": 1000000.0,
        "layer_types": ["full_attention"],
    },
}  # fmt: skip
WHOLE = AUTHORS | {"draft_vocab_size": None}
"""Drafts from the target's whole vocabulary, with the target's head."""
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
"""The compiled kernels need these sizes."""
LAYOUTS = {"authors": AUTHORS, "specforge": SPECFORGE, "speculators": SPECULATORS, "whole": WHOLE}
WIDE = {"wide": AUTHORS | SIZES, **{f"wide {name}": LAYOUTS[name] | SIZES for name in LAYOUTS if name != "authors"}}
LAYOUTS |= WIDE


def flat(layout: str) -> dict[str, Any]:
    """A layout's config without sections."""
    config = LAYOUTS[layout]
    return config.get("transformer_layer_config", {}) | config


def tensors_of(layout: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """The random tensors of a folder by name, large enough to matter."""
    draw, config = torch.Generator().manual_seed(seed), flat(layout)
    layout = layout.removeprefix("wide ")
    layer = "layers.0." if layout == "speculators" else "midlayer."
    size, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, len(LAYER_IDS) * size), "norm.weight": (size,),
        f"{layer}hidden_norm.weight": (size,), f"{layer}input_layernorm.weight": (size,),
        f"{layer}post_attention_layernorm.weight": (size,),
        f"{layer}self_attn.q_proj.weight": (q, 2 * size), f"{layer}self_attn.k_proj.weight": (kv, 2 * size),
        f"{layer}self_attn.v_proj.weight": (kv, 2 * size), f"{layer}self_attn.o_proj.weight": (size, q),
        f"{layer}mlp.gate_proj.weight": (inner, size), f"{layer}mlp.up_proj.weight": (inner, size),
        f"{layer}mlp.down_proj.weight": (size, inner),
    }  # fmt: skip
    if layout != "whole":
        shapes["lm_head.weight"] = (DRAFTED, size)
    if layout == "specforge":
        shapes |= {f"aux_norm_{part}.weight": (size,) for part in ("low", "mid", "high")}
    if layout == "speculators":
        shapes["embed_tokens.weight"] = (VOCAB, size)
        shapes |= {f"{layer}self_attn.{p}_proj.bias": (rows,) for p, rows in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {f"{layer}self_attn.{p}_norm.weight": (head,) for p in "qk"}
    made = {name: torch.randn(shape, generator=draw) * 0.3 + ("norm" in name) for name, shape in shapes.items()}
    if layout != "whole":
        known = torch.randperm(VOCAB, generator=draw)[:DRAFTED].sort().values
        made["d2t"] = known - torch.arange(DRAFTED)
        made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, known, True)
    return made


def save_eagle(folder: Path, layout: str = "authors", seed: int = 0, **changes: Any) -> Path:
    """Write a folder of a layout, with changes of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LAYOUTS[layout] | changes))
    save_file(tensors_of(layout, seed), folder / "model.safetensors")
    return folder
