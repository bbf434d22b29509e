"""Published shapes: Qwen3-8B's config.json and its DSpark drafter's. A rehearsal makes them tiny."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from timing import DEVICE, TINY

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""https://huggingface.co/Qwen/Qwen3-8B; first and last token are the embedded model's, since its tokenizer is
copied."""
DSPARK: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "attention_bias": False, "block_size": 7,
    "confidence_head_with_markov": True, "enable_confidence_head": True, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 12288, "markov_head_type": "vanilla", "markov_rank": 256,
    "mask_token_id": 151669, "max_position_embeddings": 40960, "num_attention_heads": 32, "num_hidden_layers": 5,
    "num_key_value_heads": 8, "num_target_layers": 36, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "target_layer_ids": [1, 9, 17, 25, 33],
    "vocab_size": 151936,
}  # fmt: skip
"""https://huggingface.co/deepseek-ai/dspark_qwen3_8b_block7"""
if TINY:
    SMALL = {
        "hidden_size": 128, "intermediate_size": 256, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    QWEN3_8B |= SMALL | {"num_hidden_layers": 6, "vocab_size": 49152}
    DSPARK |= SMALL | {
        "num_hidden_layers": 2, "num_target_layers": 6, "target_layer_ids": [1, 2, 4], "vocab_size": 49152,
        "mask_token_id": 3, "markov_rank": 16,
    }  # fmt: skip


def write_model(folder: Path, tokenizer: Path) -> Path:
    """Write a model folder with a single tensor of weights, for which SGLang makes random ones; return the folder.
    tokenizer: folder of another model with fewer tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.iterdir():
        if "token" in file.name or file.name == "chat_template.jinja":
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    save_file({"model.norm.weight": torch.ones(QWEN3_8B["hidden_size"])}, folder / "model.safetensors")
    return folder


def write_drafter(folder: Path) -> Path:
    """Return a drafter of random weights, as a checkpoint that SGLang's own DSPARK reads, too."""
    from outrider.drafters.block import checkpoint
    from outrider.drafters.block.config import BlockConfig
    from outrider.drafters.block.model import BlockModel

    torch.manual_seed(1)
    with torch.device(DEVICE):
        model = BlockModel(BlockConfig.from_json(DSPARK), None)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
    checkpoint.save_plain(model.bfloat16(), folder)
    return folder
