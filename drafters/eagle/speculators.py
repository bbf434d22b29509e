"""EAGLE-3 heads written in the format of vLLM's `speculators`, which `config.py` and `checkpoint.py` read too."""

from pathlib import Path
from typing import Any

import torch

from ..chain.drafter import with_shared
from ..chain.network import ATTENTION, ChainWeights
from ..checkpoint import write_folder
from ..config_file import CheckpointError
from .checkpoint import vocabulary_tensors

BIASES = {f"{ATTENTION}{part}_proj.bias" for part in "qkvo"}


def save_speculators(
    weights: ChainWeights, embedding: torch.Tensor, head: torch.Tensor, verifier: dict[str, Any], folder: str | Path
) -> None:
    """Write a head in bfloat16, including embedding and head: its own, or the target's [V, d].

    verifier: `name_or_path` and `architectures` of the target. Raises CheckpointError where the format cannot hold a
        part of the head.
    """
    config, biases, no_place = weights.config, BIASES & weights.tensors.keys(), []
    if "fc.bias" in weights.tensors or len(biases) not in (0, len(BIASES)):
        no_place.append("biases of some products")
    if config.target_hidden_size != config.hidden_size:
        no_place.append(f"hidden_size {config.hidden_size} with the target's {config.target_hidden_size}")
    if no_place:
        raise CheckpointError(f"speculators' format has no place for {' and '.join(no_place)}")
    rows, head = with_shared(weights, embedding, head)
    assert isinstance(rows, torch.Tensor)
    tensors = weights.tensors | {"embed_tokens.weight": rows, "lm_head.weight": head}
    tensors = {name: value.detach().cpu().bfloat16() for name, value in tensors.items()} | vocabulary_tensors(weights)
    write_folder(folder, tensors, _config(weights, verifier))


def _config(weights: ChainWeights, verifier: dict[str, Any]) -> dict[str, Any]:
    """Return the content of `config.json`. Layer ids count the inputs of layers."""
    config, tensors = weights.config, weights.tensors
    normed = f"{ATTENTION}q_norm.weight" in tensors
    layer = config.layers_json() | {"num_hidden_layers": 1, "rope_scaling": config.rope or None}
    layer |= {"model_type": "qwen3" if normed else "llama", "attention_bias": bool(BIASES & tensors.keys())}
    method = {"proposal_type": "greedy", "speculative_tokens": config.gamma}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
        "transformer_layer_config": layer | {"tie_word_embeddings": False},
        "draft_vocab_size": config.logit_size,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in weights.layers],
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "norm_before_fc": "input_norm.weight" in tensors,
        "fc_norm": "fc_norm.0.weight" in tensors,
    }
