"""Rotary positions of a GGUF file, as `rope_parameters` of transformers' config.json."""

import math
from typing import Any

from ..errors import UserError
from .gguf_file import GgufFile

LLAMA_3_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
TENSORS = (LLAMA_3_FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Tensors with factors of the wavelengths of a head's pairs."""
PARTIAL = ("phi3",)
"""Architectures that may rotate a part of each head."""


def parameters(file: GgufFile, head: int) -> dict[str, Any]:
    """Return the parameters of the file's rotary positions; raises UserError for a scaling that is not served.

    head: width of a head.
    """
    theta, rotated = file.hyper("rope.freq_base", 10000.0), file.hyper("rope.dimension_count", head)
    plain = {"rope_type": "default", "rope_theta": theta}
    if rotated != head:
        if file.architecture not in PARTIAL:
            raise UserError(f"{file.path}: only heads that are rotated as a whole are supported from a GGUF file")
        plain["partial_rotary_factor"] = rotated / head
    if LLAMA_3_FACTORS in file.tensors:
        return plain | _llama_3(file, theta, rotated)
    if LONG_FACTORS in file.tensors:
        return plain | _long(file)
    factor = file.hyper("rope.scaling.factor", file.hyper("rope.scale_linear", 0.0))
    scaling = file.text(f"{file.architecture}.rope.scaling.type", "linear" if factor else "none")
    if scaling in ("none", ""):
        return plain
    if scaling == "linear":
        return plain | {"rope_type": "linear", "factor": factor or 1.0}
    if scaling == "yarn":
        return plain | _yarn(file, factor)
    raise UserError(f"{file.path}: positions scaled by {scaling!r} are not supported from a GGUF file")


def _yarn(file: GgufFile, factor: float) -> dict[str, Any]:
    """Return YaRN's (arXiv:2309.00071). YaRN's own factor is in transformers' attention_factor, not in SGLang's."""
    for name, usual in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if file.hyper(f"rope.scaling.{name}", usual) != usual:
            raise UserError(f"{file.path}: positions scaled by 'yarn' with {name} are not supported from a GGUF file")
    attention = file.hyper("rope.scaling.attn_factor", 1.0) * file.hyper("rope.scaling.yarn_attn_factor", 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.hyper("rope.scaling.original_context_length"),
        "beta_fast": file.hyper("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": file.hyper("rope.scaling.yarn_beta_slow", 1.0),
        "attn_factor": attention,
        "attention_factor": attention * (1 + 0.1 * math.log(factor)),
    }


def _long(file: GgufFile) -> dict[str, Any]:
    """Return LongRoPE's (arXiv:2402.13753): the file has factors for short and for long contexts."""
    return {
        "rope_type": "longrope",
        "long_factor": file.tensor(LONG_FACTORS).read().tolist(),
        "short_factor": file.tensor(SHORT_FACTORS).read().tolist(),
        "original_max_position_embeddings": file.hyper("rope.scaling.original_context_length"),
        "attention_factor": file.hyper("rope.scaling.attn_factor", 1.0),
    }


def _llama_3(file: GgufFile, theta: float, width: int) -> dict[str, Any]:
    """Return Llama 3's scaling; the file has one factor for each frequency. Raises UserError for other factors."""
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
