"""Models that SGLang lacks, and models of SGLang's that have to differ here."""

from typing import Any, ClassVar

import torch
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Phi3LongRoPEScaledRotaryEmbedding
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.models import gemma3_causal
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.utils import is_cpu

from .. import must_take


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """A Llama without rotation in some layers (arXiv:2501.18795); SGLang does not have it."""

    def __init__(self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        for layer, rotates in zip(self.model.layers, config.no_rope_layers, strict=False):
            if not rotates:
                layer.self_attn.rotary_emb = Unrotated()


class Unrotated(torch.nn.Module):
    """Rotary positions of a layer that has none."""

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return query, key


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi-3 and Phi-4 with one table of LongRoPE's for all positions.

    SGLang switches to the factors for long contexts as soon as any request of a batch is long. A token would then
    depend on the other requests' lengths, and its keys on when they were written. Here the longest context that is
    served decides, as in llama.cpp.
    """

    def __init__(self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        for layer in self.model.layers:
            attention = layer.self_attn
            if isinstance(attention.rotary_emb, Phi3LongRoPEScaledRotaryEmbedding):
                attention.rotary_emb = _one_table(attention.rotary_emb, config)


def _one_table(rope: Phi3LongRoPEScaledRotaryEmbedding, config: Any) -> RotaryEmbedding:
    from sglang.srt.runtime_context import get_server_args

    served = get_server_args().context_length or rope.max_position_embeddings
    longer = served > rope.original_max_position_embeddings
    factors = torch.tensor(rope.long_factor if longer else rope.short_factor)
    stated = config.rope_parameters.get("attention_factor")
    return LongRotary(rope, factors, rope.long_mscale if stated is None else stated)


class LongRotary(RotaryEmbedding):
    """Rotary positions with a factor for each wavelength, and scaled queries and keys (arXiv:2402.13753)."""

    def __init__(self, rope: Phi3LongRoPEScaledRotaryEmbedding, factors: torch.Tensor, scale: float) -> None:
        self._factors, self._scale = factors, scale
        dtype = rope.long_cos_sin_cache.dtype
        super().__init__(rope.head_size, rope.rotary_dim, rope.max_position_embeddings, rope.base, True, dtype)

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        return super()._compute_inv_freq(base) / self._factors

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        return super()._compute_cos_sin_cache() * self._scale


class Gemma3ForCausalLM(gemma3_causal.Gemma3ForCausalLM):
    """Gemma 3 with an embedding of SGLang's class, so that it may stay in blocks. On a CPU its positions are looked up
    in SGLang's tables, so a token's do not depend on its batch."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {}  # head and embedding are one module, not two with one weight

    def __init__(self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        name = f"{prefix}.embed_tokens" if prefix else "model.embed_tokens"
        embedding = ScaledEmbedding(config.vocab_size, config.hidden_size, quant_config=quant_config, prefix=name)
        self.model.embed_tokens = embedding
        if config.tie_word_embeddings:
            self.lm_head = embedding
        for layer in self.model.layers:
            attention = layer.self_attn
            if not attention.is_sliding:
                attention.rotary_emb = get_rope(
                    attention.head_dim,
                    rotary_dim=attention.rotary_dim,
                    max_position=config.max_position_embeddings,
                    base=attention.rope_theta,
                    rope_scaling=dict(config.rope_parameters["full_attention"]),
                )


class ScaledEmbedding(VocabParallelEmbedding):
    """An embedding with rows multiplied by the root of their width."""

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        return super().forward(input_) * self.embedding_dim**0.5


class AttentionOfTokens(RadixAttention):
    """Attention of Hunyuan's layers, which output queries and keys with a row for each head: SGLang expects rows for
    tokens."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        return super().forward(q.reshape(len(v), -1), k.reshape(len(v), -1), v, *others, **more)


def _with_rows_of_tokens(model: type) -> type:
    class Hunyuan(model):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            for layer in self.modules():
                if isinstance(layer, RadixAttention):
                    layer.__class__ = AttentionOfTokens

    return Hunyuan


class NoEmbedding(torch.nn.Module):
    """Takes the place where `Gemma3ForCausalLM` puts an embedding."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__()


def register() -> None:
    from sglang.srt.models.registry import ModelRegistry

    from . import transformers_models

    transformers_models.register()
    for name in ("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM"):
        model = ModelRegistry.models.get(name)
        if model is not None and model.__module__ != __name__:
            ModelRegistry.models[name] = _with_rows_of_tokens(model)
    ModelRegistry.models["SmolLM3ForCausalLM"] = SmolLM3ForCausalLM
    ModelRegistry.models["Phi3ForCausalLM"] = Phi3ForCausalLM
    ModelRegistry.models["Gemma3ForCausalLM"] = Gemma3ForCausalLM
    must_take.replace(gemma3_causal, "Gemma3TextScaledWordEmbedding", NoEmbedding)
    # The flag's name is of instructions, but it selects tables.
    must_take.replace(gemma3_causal, "_is_cpu_amx_available", is_cpu())
