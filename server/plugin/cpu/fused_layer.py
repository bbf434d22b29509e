"""The constants of a layer of SGLang's classes for Llama (Mistral, SmolLM and more), Qwen2 and Qwen3, for
`fused_model`.

SGLang's own forward stays for a model with a layer that our kernels do not support: other biases, quantised caches,
other rotary embeddings. Both give the same bits, since both are made of the same kernels.
"""

from typing import Any

from outrider.kernels.decoder import DecoderLayer

from ..flat_attention import FlatAttentionBackend


def prepared(module: Any, backend: Any) -> DecoderLayer | None:
    """Return the layer's constants, or None if only SGLang's own forward supports it."""
    from sglang.srt.models.llama import LlamaDecoderLayer
    from sglang.srt.models.qwen2 import Qwen2DecoderLayer
    from sglang.srt.models.qwen3 import Qwen3DecoderLayer

    if type(module) not in (LlamaDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer):
        return None
    attention, mlp, norms = module.self_attn, module.mlp, (module.input_layernorm, module.post_attention_layernorm)
    of_heads = (attention.q_norm, attention.k_norm) if type(module) is Qwen3DecoderLayer else ()
    products = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    plain = (
        isinstance(backend, FlatAttentionBackend)
        and _is_plain_attention(attention, backend.token_to_kv_pool)
        and all(is_plain_norm(norm) for norm in (*norms, *of_heads))
        and len({norm.variance_epsilon for norm in (*norms, *of_heads)}) == 1
        and all(_is_plain_product(product) for product in products)
        and all(product.bias is None for product in products[1:])
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
            head_norms=[norm.weight.data for norm in of_heads],
            bias=None if attention.qkv_proj.bias is None else attention.qkv_proj.bias.data,
        )
    except ValueError:  # no compiled kernels here
        return None


def _is_plain_product(product: Any) -> bool:
    from sglang.srt.distributed.utils import get_group_rank_size
    from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear

    if type(product) not in (MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear):
        return False
    _, ranks = get_group_rank_size(product.tp_group)
    return hasattr(product, "packed") and ranks == 1


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
        and type(rope).forward_native is RotaryEmbedding.forward_native  # subclasses differ only in their angles
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
