"""Runs all layers of Llama-like models, Qwen2 and Qwen3 in one call, where `fused_layer` supports every one of them.

SGLang's own loop stays for everything else: input embeddings, a part of a pipeline, a layer with special features. Both
give the same bits.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from outrider.kernels.decoder import Decoder, forward_by_operations
from outrider.kernels.flat_batch import FlatBatch

from .. import must_take
from . import fused_layer

logger = logging.getLogger(__name__)


def register() -> None:
    from sglang.srt.environ import envs
    from sglang.srt.models.llama import LlamaModel
    from sglang.srt.models.qwen2 import Qwen2Model
    from sglang.srt.models.qwen3 import Qwen3Model

    envs.SGLANG_EAGER_INPUT_NO_COPY.set(True)  # copies of a step's inputs are only for replays of a graph
    for model in (LlamaModel, Qwen2Model, Qwen3Model):
        model.outrider_decoder = model.outrider_adapters = None
        must_take.replace(model, "forward", _in_one_call(model.forward))


def _in_one_call(original: Callable[..., Any]) -> Callable[..., Any]:
    from sglang.srt.model_executor.forward_context import get_attn_backend

    def forward(
        self: Any,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        backend = get_attn_backend()
        plain = input_embeds is None and pp_proxy_tensors is None and positions.ndim == 1
        plain = plain and 0 not in self.layers_to_capture
        decoder = decoder_of(self, backend) if plain else None
        if decoder is None:
            return original(self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        captured = captured_layers(self)
        slots = forward_batch.out_cache_loc
        embedded = self.embed_tokens(input_ids)
        read = _read_rows(forward_batch, backend, bool(captured))
        hidden, kept = run(self, decoder, embedded, positions, slots, backend.batch, captured, backend.causal, read)
        if read is not None:  # SGLang reads only these rows, at their places
            hidden = embedded.new_zeros(embedded.shape).index_copy_(0, read, hidden)
        return (hidden, kept.flatten(1)) if captured else hidden

    return forward


def _read_rows(forward_batch: Any, backend: Any, captured: bool) -> torch.Tensor | None:
    """Return the last row of each request, if a prompt is read and only the next token's logits are wanted. Else return
    None: all rows are read. captured: requested hidden states come from other layers."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    if forward_batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED) or not backend.causal:
        return None
    if forward_batch.return_logprob or (forward_batch.capture_hidden_mode.is_full() and not captured):
        return None
    ends = backend.batch.qo_indptr.long()
    return ends[1:] - 1 if bool((ends.diff() > 0).all()) else None


def run(
    model: Any,
    decoder: Decoder,
    embedded: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    batch: FlatBatch,
    captured: list[int],
    causal: bool,
    read: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run all layers, as `Decoder.forward`; one operation after the other where the forward has adapters."""
    adapters = model.outrider_adapters
    if adapters is None or not adapters.active:
        return decoder.forward(embedded, positions, slots, batch, captured, causal, read)
    added = adapters.added_to_layer
    return forward_by_operations(decoder, embedded, positions, slots, batch, captured, causal, read, added)


def captured_layers(model: Any) -> list[int]:
    """Return the layers with inputs that are kept for the drafter, ascending."""
    return sorted(i for i in set(model.layers_to_capture) if i < len(model.layers))


def decoder_of(model: Any, backend: Any) -> Decoder | None:
    """Return the decoder, made at the first step, when weights and cache are in place; None where SGLang's own loop
    stays."""
    pool = getattr(backend, "token_to_kv_pool", None)
    angles = getattr(getattr(model.layers[0], "self_attn", None), "rotary_emb", None)
    key = pool, getattr(angles, "cos_sin_cache", None)  # SGLang may make either of them anew
    known = model.outrider_decoder
    if known is None or known[0][0] is not key[0] or known[0][1] is not key[1]:
        model.outrider_decoder = key, _prepare(model, backend)
    return model.outrider_decoder[1]


def _prepare(model: Any, backend: Any) -> Decoder | None:
    group = model.pp_group
    if not (group.is_first_rank and group.is_last_rank and fused_layer.is_plain_norm(model.norm)):
        return None
    layers = [layer for module in model.layers if (layer := fused_layer.prepared(module, backend)) is not None]
    if len(layers) < len(model.layers) or model.norm.variance_epsilon != layers[0].eps:
        return None
    angles = [module.self_attn.rotary_emb.cos_sin_cache for module in model.layers]
    if any(table.data_ptr() != angles[0].data_ptr() for table in angles):
        return None
    pool, ids = backend.token_to_kv_pool, [module.self_attn.attn.layer_id for module in model.layers]
    pools = [(pool.get_key_buffer(i), pool.get_value_buffer(i)) for i in ids]
    try:
        decoder = Decoder(layers, pools, model.norm.weight.data, angles[0])
    except (ValueError, RuntimeError) as error:  # layers of several shapes
        logger.info("the model's layers do not run in one call: %s", error)
        return None
    logger.info("the model's %d layers run in one call", len(layers))
    return decoder
