"""The block drafter's network in two calls of the compiled kernels; `BlockModel` is its plain torch version.

Weights of a bfloat16 model are kept in 8 bits, because reading and multiplying them takes most of a draft's time. Where
the processor multiplies bytes, activations are rounded to 8 bits as well. Tokens are drawn from q of the rounded model,
so answers keep their distribution. Weights of a float32 model stay float32.
"""

from collections.abc import Sequence
from typing import Any

import torch

from outrider.kernels.cpu import native
from outrider.kernels.linear import PackedWeight, pack
from outrider.kernels.weights import pack_int8

from ..base import DraftBatch, Features, Rows
from .heads import GREEDY, SAMPLED, MarkovHead
from .layers import Rotary
from .model import BlockModel

Pools = list[tuple[torch.Tensor, torch.Tensor]]
MULTIPLIES_BYTES = ("avxvnni", "avx512bf16", "amx")
"""Instruction sets, of `native.instruction_set`, that have sums of products of bytes (VNNI)."""


def prepare(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
    """Pack a weight [outputs, depth] and its bias [outputs] for the fastest multiplication on this CPU."""
    if weight.dtype != torch.bfloat16:
        return pack(weight, bias)
    return pack_int8(weight, bias, "int8" if native.instruction_set() in MULTIPLIES_BYTES else "float")


def native_arguments(weights: Sequence[PackedWeight]) -> tuple[list[Any], ...]:
    """Split prepared weights into the native classes' lists: panels, kinds, outputs, depths."""
    return tuple([getattr(weight, name) for weight in weights] for name in ("panels", "kind", "outputs", "depth"))


class CompiledBlock:
    """The parts of a model and its target that the calls need.

    embedding: [V, d] of the target. head: [V', d], the target's rows that the model drafts from.
    weights: of each layer (q|k|v, out, gate|up, down), the head, fc, keys|values of all layers, W2 if there is one, and
        the kernel projections of each layer's convolutions; their base kernels are passed apart.
    norms: of each layer (before attention, of queries, of keys, before the MLP), the last and the context's.
    """

    def __init__(self, model: BlockModel, embedding: Rows, head: torch.Tensor) -> None:
        config, markov, layers = model.config, model.markov_head, model.draft_layers
        self.model, self.embedding = model, embedding
        self.mask = embedding[torch.tensor([config.mask_token_id])].to(model.fc.weight.dtype)
        self.convolutions = [c for layer in layers for c in (layer.attention_conv, layer.mlp_conv) if c is not None]
        products = [w.weight for layer in layers for w in (layer.qkv, layer.o_proj, layer.gate_up, layer.down_proj)]
        products += [
            head,
            model.fc.weight,
            torch.cat([layer.qkv.weight[layer.heads * layer.dim :] for layer in layers]),
        ]
        products += [] if markov is None else [markov.w2.weight]
        products += [convolution.kernel_projection.weight for convolution in self.convolutions]
        self.weights = [prepare(weight) for weight in products]
        norms = [n for x in layers for n in (x.input_layernorm, x.q_norm, x.k_norm, x.post_attention_layernorm)]
        self.norms = [norm.weight for norm in (*norms, model.norm, model.hidden_norm)]
        self._native: Any = None

    def allocate(self, pools: Pools) -> None:
        """Work on these pools [S, Hkv, D] of every layer from now on."""
        model, config = self.model, self.model.config
        table = Rotary(config).table  # and rows for blocks that go beyond an answer's last position
        table = torch.cat([table, table[-1:].expand(config.queries, -1)])
        self._native = torch.classes.outrider.BlockDrafter(
            *native_arguments(self.weights), self.norms, *zip(*pools, strict=True), cos_sin(table), self.mask,
            None if model.markov_head is None else model.markov_head.w1.weight, confidence_weights(model),
            model.vocab if config.draft_vocab_size else None, [c.base_kernel for c in self.convolutions],
            config.first_row, config.rms_norm_eps,
        )  # fmt: skip

    def observe(self, features: Features) -> torch.Tensor:
        """Write the state of N > 0 tokens with `hidden` into the pools; return `BlockModel.context`."""
        assert features.hidden is not None
        hidden = features.hidden.to(self.mask.dtype).contiguous()
        return self._native.observe(hidden, features.positions, features.slots)

    def forward(self, batch: DraftBatch, gamma: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [R, gamma, V'] and hidden states [R, gamma, d], for models that draw their tokens in torch."""
        embedded = self.embedding[batch.anchors].to(self.mask.dtype)
        where = batch.seq_lens, batch.rows, batch.page_table
        hidden, logits = self._native.forward(embedded, *where, gamma)
        return logits.view(len(embedded), gamma, -1), hidden.view(len(embedded), gamma, -1)

    def propose(self, batch: DraftBatch, gamma: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return tokens [R, gamma], probs [R, gamma, V'] (None: all greedy or not wanted), confidence [R, gamma]."""
        embedded = self.embedding[batch.anchors].to(self.mask.dtype)
        return self._native.propose(
            batch.anchors, embedded, batch.seq_lens, batch.rows, batch.page_table, *batch.rules,
            batch.keys[:, :gamma].contiguous(), gamma, batch.wants_probs,
        )  # fmt: skip


def compile_block(model: BlockModel, embedding: Rows, head: torch.Tensor) -> CompiledBlock | None:
    """Prepare a model once; None where compiled kernels are missing or do not support its shape."""
    config, markov = model.config, model.markov_head
    known = (markov is None or type(markov) is MarkovHead) and config.head_dim % 32 == 0
    even = config.hidden_size % 16 == 0 and config.intermediate_size % 16 == 0 and config.markov_rank % 2 == 0
    convolved = config.convolution is None or config.convolution.group % 16 == 0
    if config.windows or config.gemma or not (known and even and convolved and native.fits(model.fc.weight, head)):
        return None
    return CompiledBlock(model, embedding, head)


def cos_sin(table: torch.Tensor) -> torch.Tensor:
    """Return cosines and sines side by side [L, D] of the rows of a `Rotary.table`."""
    half = table.shape[1] // 4
    return torch.cat([table[:, :half], table[:, -half:]], 1)


def confidence_weights(model: BlockModel) -> list[torch.Tensor]:
    """Return the confidence head's weights for the compiled kernel; none without a head.

    They are the weight of a hidden state [d], the term of each token before [V], and [2, 3] the weights of the head's
    logit, of the draft's own logit and of 1, sampled and greedy.
    """
    head, markov, size = model.confidence_head, model.markov_head, model.config.hidden_size
    if head is None:
        return []
    weight, constant = head.proj.weight[0].float(), head.proj.bias.float()
    of_tokens = constant.repeat(model.config.vocab_size)
    if markov is not None and head.with_markov:
        of_tokens = markov.w1.weight.float() @ weight[size:] + constant
    return [weight[:size].contiguous(), of_tokens, torch.tensor([SAMPLED, GREEDY])]
