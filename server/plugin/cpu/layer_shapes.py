"""KV caches on a CPU with different heads per layer: Gemma 4's windowed layers have smaller ones."""

from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from .mapped import mapped_zeros


def fit(pool: Any, model: torch.nn.Module) -> None:
    """Give each attention layer keys and values of its shape in SGLang's pool, which has one shape for all."""
    for layer in model.modules():
        if not isinstance(layer, RadixAttention):
            continue
        place = layer.layer_id - pool.start_layer
        for buffers, *shape in (
            (pool.k_buffer, layer.tp_k_head_num, layer.qk_head_dim),
            (pool.v_buffer, layer.tp_v_head_num, layer.v_head_dim),
        ):
            if list(buffers[place].shape[1:]) != shape:
                buffers[place] = mapped_zeros((len(buffers[place]), *shape), buffers[place].dtype)
