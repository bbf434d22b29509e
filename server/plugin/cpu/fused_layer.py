"""Runs the layers of Llama-like models (Llama, Mistral, SmolLM and others on SGLang's Llama classes) in one call each.

SGLang's own forward stays for every layer that has something our call does not know: biases, adapters, quantised
caches, other rotary embeddings. Both give the same bits, since both are made of the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outrider.kernels.layer import DecoderLayer, decoder_layer

from ..flat_attention import FlatAttentionBackend

NOT_PREPARED = object()
"""What `outrider_layer` of SGLang's layers is until their first step: from then on it is a DecoderLayer, or None where
SGLang's own forward stays."""


def register() -> None:
    from sglang.srt.models.llama import LlamaDecoderLayer

    LlamaDecoderLayer.outrider_layer = NOT_PREPARED
    LlamaDecoderLayer.forward = _in_one_call(LlamaDecoderLayer.forward)


def _in_one_call(original: Callable[..., Any]) -> Callable[..., Any]:
    from sglang.srt.model_executor.forward_context import get_attn_backend

    def forward(
        self: Any,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = prepared(self, get_attn_backend())
        if layer is None or positions.ndim != 1:
            return original(self, positions, hidden_states, forward_batch, residual)
        attention, backend = self.self_attn, get_attn_backend()
        pool, layer_id = backend.token_to_kv_pool, attention.attn.layer_id
        out = decoder_layer(
            None if residual is None else hidden_states,
            hidden_states if residual is None else residual,
            layer,
            positions,
            attention.rotary_emb.cos_sin_cache,
            pool.get_key_buffer(layer_id),
            pool.get_value_buffer(layer_id),
            forward_batch.out_cache_loc,
            backend.batch,
            backend.causal,
        )
        return out, hidden_states if residual is None else residual

    return forward


def prepared(module: Any, backend: Any) -> DecoderLayer | None:
    """Made at the first step, when weights are in place; None where SGLang's own forward stays."""
    if module.outrider_layer is NOT_PREPARED:
        module.outrider_layer = _prepare(module, backend)
    return module.outrider_layer


def _prepare(module: Any, backend: Any) -> DecoderLayer | None:
    """The layer's constants, or None where it has something that only SGLang's own forward knows."""
    attention, mlp, norms = module.self_attn, module.mlp, (module.input_layernorm, module.post_attention_layernorm)
    products = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    plain = (
        isinstance(backend, FlatAttentionBackend)
        and _is_plain_attention(attention, backend.token_to_kv_pool)
        and all(is_plain_norm(norm) for norm in norms)
        and all(_is_plain_product(product) for product in products)
    )
    if not plain:
        return None
    attn = attention.attn
    try:
        return DecoderLayer(
            weights=[product.packed for product in products],
            norms=[norm.weight.data for norm in norms],
            eps=norms[0].variance_epsilon,
            scale=attn.scaling,
            window=attn.sliding_window_size if attn.sliding_window_size is not None else -1,
            logit_cap=attn.logit_cap,
        )
    except ValueError:  # no compiled kernels here
        return None


def _is_plain_product(product: Any) -> bool:
    from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear

    known = type(product) in (MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear)
    return known and hasattr(product, "packed") and product.bias is None and product.tp_size == 1


def is_plain_norm(norm: Any) -> bool:
    from sglang.srt.layers.layernorm import RMSNorm

    special = norm.variance_size_override is not None or norm.cast_x_before_out_mul or norm.fp32_residual
    return type(norm) is RMSNorm and not special and norm.weight.shape[0] % 16 == 0


def _is_plain_attention(attention: Any, pool: Any) -> bool:
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    rope, attn = attention.rotary_emb, attention.attn
    weight = attention.qkv_proj.packed
    return (
        isinstance(rope, RotaryEmbedding)
        and type(rope).forward_native is RotaryEmbedding.forward_native  # others differ in their angles alone
        and rope.is_neox_style
        and rope.rotary_dim % 32 == 0
        and rope.cos_sin_cache.is_contiguous()
        and attn.attn_type == AttentionType.DECODER
        and attn.qk_head_dim % 16 == 0
        and attn.v_head_dim == attn.qk_head_dim
        and attn.k_scale is None
        and isinstance(pool, MHATokenToKVPool)
        and type(pool)._store_kv_layer is MHATokenToKVPool._store_kv_layer
        and pool.get_key_buffer(attn.layer_id).dtype == attention.qkv_proj.params_dtype
        and pool.get_key_buffer(attn.layer_id).dim() == 3
        and weight.outputs == (attn.tp_q_head_num + 2 * attn.tp_k_head_num) * attn.qk_head_dim
    )
