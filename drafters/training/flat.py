"""The target's forward over the tokens of many texts in one row, without padding, with the kernels that also serve it.

A Llama-like model on a CPU runs all its layers in one compiled call, from packed weights; all other models run through
transformers' attention interface.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from outrider.kernels.attention import flat_attention
from outrider.kernels.cpu import native
from outrider.kernels.decoder import Decoder, DecoderLayer
from outrider.kernels.flat_batch import FlatBatch
from outrider.kernels.linear import pack, packed_linear

from .target import TargetModel

ATTENTION = "outrider_flat"


class CompiledLayers:
    """All layers of a Llama in one call, and its head; for `slots` tokens of cache at positions below `longest`.

    Raises
    ------
    ValueError
        The call does not support the model, or there are no compiled kernels.
    """

    def __init__(self, target: TargetModel, slots: int, longest: int) -> None:
        model, config, embedding = target.model.model, target.config, target.embedding
        layers = list(model.layers)
        if not (native.fits(embedding) and all(type(layer) is LlamaDecoderLayer for layer in layers)):
            raise ValueError("only Llama's layers on a CPU, with compiled kernels")
        width = layers[0].self_attn.head_dim
        if config.hidden_act != "silu" or width % 32 or config.hidden_size % 32 or config.intermediate_size % 32:
            raise ValueError("only SiLU, and widths that are multiples of 32")
        positions = torch.arange(longest)[None]
        cos, sin = model.rotary_emb(embedding[:1].float(), positions)
        half = cos.shape[-1] // 2
        self.target, self.embedding = target, embedding
        self.head = pack(target.head)
        shape = slots, config.num_key_value_heads, width
        pools = [(embedding.new_zeros(shape), embedding.new_zeros(shape)) for _ in layers]
        prepared = [_prepared(layer) for layer in layers]
        angles = torch.cat([cos[0, :, :half], sin[0, :, :half]], -1).float().contiguous()
        self.decoder = Decoder(prepared, pools, model.norm.weight, angles)

    def forward(self, ids: torch.Tensor, slots: torch.Tensor, batch: FlatBatch) -> torch.Tensor:
        """Run N tokens, as `ModuleLayers.forward`."""
        hidden, _ = self.decoder.forward(self.embedding[ids], batch.positions, slots, batch)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] of final states [R, d]."""
        return packed_linear(hidden, self.head)


def _prepared(layer: Any) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    inner = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    inner += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if any(product.bias is not None for product in inner):
        raise ValueError("only layers without biases")
    q, k, v, out, gate, up, down = (product.weight for product in inner)
    weights = [torch.cat([q, k, v]), out, torch.cat([gate, up]), down]
    norms: list[LlamaRMSNorm] = [layer.input_layernorm, layer.post_attention_layernorm]
    return DecoderLayer(
        weights=[pack(weight) for weight in weights],
        norms=[norm.weight for norm in norms],
        eps=norms[0].variance_epsilon,
        scale=attention.scaling,
    )


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged_cache: ModuleLayers | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention interface: ours inside `ModuleLayers.forward`, torch's everywhere else."""
    if paged_cache is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **others
        )
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    keys, values = paged_cache.write(int(module.layer_idx), k, v)  # type: ignore[arg-type]
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    window = -1 if sliding_window is None else sliding_window - 1
    out = flat_attention(q, keys, values, paged_cache.batch, scale=scale, window=window, logit_cap=softcap or 0.0)
    return out[None], None


class ModuleLayers:
    """Any model that uses transformers' attention interface, with a cache of `size` tokens. slots, batch: of the
    present step, as in `forward`."""

    slots: torch.Tensor
    batch: FlatBatch

    def __init__(self, target: TargetModel, size: int) -> None:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        if target.model.config._attn_implementation != ATTENTION:
            target.model.set_attn_implementation(ATTENTION)
        self.target, self.size = target, size
        self.pools: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer, [size, Hkv, D]
        # With four dimensions, transformers makes no mask of its own.
        self.unmasked = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=target.device)

    def forward(self, ids: torch.Tensor, slots: torch.Tensor, batch: FlatBatch) -> torch.Tensor:
        """Run N tokens `ids`; their keys and values go to `slots` [N]. Returns the final states [N, d]."""
        self.slots, self.batch = slots, batch
        hidden = self.target.model.model(
            input_ids=ids[None], position_ids=batch.positions[None], attention_mask=self.unmasked,
            use_cache=False, paged_cache=self,
        ).last_hidden_state[0]  # fmt: skip
        if not self.pools:
            raise ValueError(f"{type(self.target.model).__name__} does not use transformers' attention interface")
        return hidden

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [N, Hkv, D] of the step in the layer's pools; return the pools."""
        if layer not in self.pools:
            self.pools[layer] = key.new_zeros(self.size, *key.shape[1:]), value.new_zeros(self.size, *value.shape[1:])
        keys, values = self.pools[layer]
        keys[self.slots], values[self.slots] = key, value
        return keys, values

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] of final states [R, d]."""
        return F.linear(hidden, self.target.head)


def flat_layers(target: TargetModel, slots: int, longest: int) -> CompiledLayers | ModuleLayers:
    """Return the fastest layers that support this target."""
    if target.device.type != "cpu" or target.has_adapter:
        return ModuleLayers(target, slots)
    try:
        return CompiledLayers(target, slots, longest)
    except ValueError:
        return ModuleLayers(target, slots)
