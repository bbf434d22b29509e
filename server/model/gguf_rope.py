"""Rotary positions of a GGUF file, as `rope_parameters` of transformers' config.json."""

from __future__ import annotations

from typing import Any

from ..errors import UserError
from .gguf_file import GgufFile

LLAMA_3_FACTORS = "rope_freqs.weight"


def parameters(file: GgufFile, head: int) -> dict[str, Any]:
    """Parameters of the file's rotary positions; raises UserError for a scaling that is not served.

    head: width of a head, all of which is rotated.
    """
    theta, rotated = file.hyper("rope.freq_base", 10000.0), file.hyper("rope.dimension_count", head)
    plain = {"rope_type": "default", "rope_theta": theta}
    if rotated != head:
        raise UserError(f"{file.path}: only heads that are rotated as a whole are supported from a GGUF file")
    if LLAMA_3_FACTORS in file.tensors:
        return plain | _llama_3(file, theta, rotated)
    scaling = file.text(f"{file.architecture}.rope.scaling.type", "none")
    if scaling in ("none", ""):
        return plain
    raise UserError(f"{file.path}: positions scaled by {scaling!r} are not supported from a GGUF file")


def _llama_3(file: GgufFile, theta: float, width: int) -> dict[str, Any]:
    """Llama 3's scaling is in the file as one factor for each frequency."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = torch.from_numpy(file.tensor(LLAMA_3_FACTORS).read().copy())
    scaled = {
        "rope_type": "llama3",
        "factor": factors.max().item(),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        head_dim=width, hidden_size=width, num_attention_heads=1, rope_parameters=scaled | {"rope_theta": theta}
    )
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    frequencies = theta ** (-torch.arange(0, width, 2).float() / width)
    if not torch.allclose(frequencies / factors, inverse, rtol=1e-3):
        raise UserError(f"{file.path}: its factors of positions are not Llama 3's, and no others are supported")
    return scaled
