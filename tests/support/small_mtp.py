"""A small random GLM-4.5 with a real tokenizer and an MTP layer that is right about half the time, untrained.

The next token depends mostly on the last one, as in `small_target.py`; the MTP layer passes on its embedding.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from small_target import END, HEAD, HEADS, KV_HEADS, LAYERS, VOCAB, WIDTH, Exact, lively, write_tokenizer
from tiny_mtp import GLM, ROPE, add_mtp, published
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

SHAPE = ROPE | GLM | {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "max_position_embeddings": 1024, "bos_token_id": 1,
    "eos_token_id": END, "pad_token_id": END,
}  # fmt: skip


@dataclass(frozen=True)
class SmallMtp(Exact):
    folder: Path

    @classmethod
    def write(cls, folder: Path) -> Self:
        model = lively(Glm4MoeForCausalLM(Glm4MoeConfig(**SHAPE, num_hidden_layers=LAYERS, first_k_dense_replace=1)))
        quieten(model, 0.6)
        model.save_pretrained(folder)
        write_tokenizer(folder)
        layer = lively(Glm4MoeForCausalLM(Glm4MoeConfig(**SHAPE, num_hidden_layers=1, first_k_dense_replace=0)))
        quieten(layer, 0.2)
        noise = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(6)) * WIDTH**-0.5
        own = {"fc": torch.cat([torch.eye(WIDTH), 0.1 * noise], 1)}
        own |= dict.fromkeys(("embedding_norm", "hidden_norm"), torch.ones(WIDTH))
        add_mtp(folder, published("glm-4.5-air", layer, own, LAYERS))
        return cls(folder)


@torch.no_grad()
def quieten(model: Glm4MoeForCausalLM, factor: float) -> None:
    """Scale down the output that each layer adds to its input."""
    for name, weight in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight *= factor
