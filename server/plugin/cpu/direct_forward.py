"""The target's forward of a verify batch, from tokens to logits, without SGLang's batch objects.

Making these objects, which serve pipelines, graphs and gathered logits, takes time in every step. `direct_forward`
leaves SGLang's own forward in place where it meets an unknown feature; both run the same operations and give the same
bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from outrider.kernels.decoder import Decoder
from outrider.kernels.flat_batch import FlatBatch
from outrider.kernels.ragged import FlatVerify

from ..image_tokens import rotary_positions
from . import fused_model


class DirectForward:
    """model: of SGLang's classes for Llama, Qwen2 or Qwen3. backend: our attention's; the layers use its cache."""

    def __init__(self, model: Any, decoder: Decoder, backend: Any):
        self.model, self.decoder, self.backend = model, decoder, backend
        self.embedding, self.head, self.processor = model.model.embed_tokens, model.lm_head, model.logits_processor
        self.rope = model.model.layers[0].self_attn.rotary_emb
        self.pool, self.angles = backend.token_to_kv_pool, self.rope.cos_sin_cache
        self.captured = fused_model.captured_layers(model.model)

    @property
    def stands(self) -> bool:
        """True while the cache and angles that it was made with are in use."""
        return self.backend.token_to_kv_pool is self.pool and self.rope.cos_sin_cache is self.angles

    def verify(
        self, flat: FlatVerify, seq_lens: torch.Tensor, rows: torch.Tensor, reqs: Sequence[Any]
    ) -> LogitsProcessorOutput:
        """Return logits [B, V] of all tokens in the model's type, and the inputs of captured layers, side by side [B, C
        * H].

        seq_lens: [R] int64, tokens in the cache before the step. rows: [R] int64, of the page table. reqs: SGLang's
            requests.
        """
        if (adapters := self.model.model.outrider_adapters) is not None:
            adapters.route([req.lora_id for req in reqs], flat.qo_indptr.diff())
        indptr = flat.qo_indptr
        batch = FlatBatch(
            qo_indptr=indptr.int(),
            kv_lens=(seq_lens + indptr.diff()).int(),
            rows=rows,
            page_table=self.backend.page_table,
        )
        embedded = self.embedding.quant_method.embedding(self.embedding, flat.input_ids)
        model = self.model.model
        hidden, kept = fused_model.run(
            model, self.decoder, embedded, rotary_positions(flat, reqs), flat.slots, batch, self.captured, True
        )
        logits = self.processor._compute_lm_head(hidden, self.head)[:, : self.processor.vocab_size]
        return LogitsProcessorOutput(logits, hidden_states=kept.flatten(1) if self.captured else None)


def direct_forward(worker: Any, captures_hidden: bool) -> DirectForward | None:
    """Return the direct forward of SGLang's target worker, once a prefill has run; None where SGLang's own stays."""
    runner = worker.model_runner
    model, backend = runner.model, runner.attn_backend
    watched = (getattr(runner, name, None) for name in ("device_timer", "canary_manager", "msprobe_debugger"))
    if any(x is not None for x in (*watched, getattr(worker, "hicache_layer_transfer_counter", None))):
        return None
    if runner.device != "cpu" or not _is_plain(model):
        return None
    decoder = fused_model.decoder_of(model.model, backend)
    if decoder is None or bool(fused_model.captured_layers(model.model)) != captures_hidden:
        return None
    return DirectForward(model, decoder, backend)


def _is_plain(model: Any) -> bool:
    """Return True if the model is embedding, layers and head alone, with unchanged logits."""
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.models.llama import LlamaForCausalLM, LlamaModel
    from sglang.srt.models.qwen2 import Qwen2ForCausalLM, Qwen2Model
    from sglang.srt.models.qwen3 import Qwen3ForCausalLM, Qwen3Model

    known = (
        (LlamaForCausalLM.forward, LlamaModel),
        (Qwen2ForCausalLM.forward, Qwen2Model),
        (Qwen3ForCausalLM.forward, Qwen3Model),
    )
    forward = getattr(model, "forward_of_texts", type(model).forward)
    if (forward, type(getattr(model, "model", None))) not in known:
        return False
    processor, embedding = model.logits_processor, model.model.embed_tokens
    special = ("do_tensor_parallel_all_gather", "logit_scale", "final_logit_softcapping", "return_full_logits")
    return (
        type(processor) is LogitsProcessor
        and not any(getattr(processor, name, None) for name in special)
        and embedding.tp_size == 1
        and getattr(embedding, "output_dtype", None) is None
        and 0 not in model.model.layers_to_capture
    )
