"""The block drafter's network in two calls of the compiled kernels, beside its plain torch version (`BlockModel`).

Weights of a bfloat16 model are kept in blocks of 8 bits: a draft's time is mostly reading them. Its q is what the
rounded model says, and tokens are drawn from just that, so answers keep their distribution. A float32 model's are kept
as they are, and so is W2: it is read gamma times, by then from a cache, and expanding it would take longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.blocks import BLOCK, BlockWeight, pack_blocks, quantise_q8_0
from outrider.kernels.cpu import native
from outrider.kernels.linear import PackedWeight, pack

from ..base import DraftBatch, Features
from ..target import Rows
from .heads import MarkovHead
from .layers import Rotary
from .model import BlockModel

Pools = list[tuple[torch.Tensor, torch.Tensor]]


class Weights:
    """Weights as the compiled calls take them: packed, the kind of each (-1: panels), its outputs."""

    def __init__(self, *prepared: BlockWeight | PackedWeight) -> None:
        self.packed = [w.blocks if isinstance(w, BlockWeight) else w.panels for w in prepared]
        self.kinds = [w.kind if isinstance(w, BlockWeight) else -1 for w in prepared]
        self.outputs = [w.outputs for w in prepared]


def prepare(weight: torch.Tensor) -> BlockWeight | PackedWeight:
    """A weight [outputs, depth] in blocks of 8 bits where it is bfloat16 and its depth allows, otherwise in panels."""
    if weight.dtype != torch.bfloat16 or weight.shape[1] % BLOCK:
        return pack(weight)
    return pack_blocks(quantise_q8_0(weight), "Q8_0", *weight.shape)


@dataclass(frozen=True, slots=True)
class CompiledBlock:
    """What the calls need of a model and its target.

    embedding: [V, d]. mask: [1, d], its row of the mask token.
    draft: weights of each layer (q|k|v, out, gate|up, down), the head, W2. observed: fc, keys|values of all layers.
    draft_norms: of each layer (before attention, of queries, of keys, before the MLP), and the last.
    observed_norms: of the context, and of each layer's keys.
    sure: the confidence head's weight of a hidden state [d], and what it adds for each token before [V]; or nothing.
    """

    model: BlockModel
    embedding: Rows
    mask: torch.Tensor
    cos_sin: torch.Tensor
    draft: Weights
    observed: Weights
    draft_norms: list[torch.Tensor]
    observed_norms: list[torch.Tensor]
    w1: torch.Tensor | None
    sure: list[torch.Tensor]
    vocab: torch.Tensor | None

    def observe(self, pools: Pools, features: Features) -> None:
        """Write the state of N > 0 tokens, whose `hidden` is given, into the pools [S, Hkv, D] of every layer."""
        assert features.hidden is not None
        hidden = features.hidden.to(self.mask.dtype).contiguous()
        weights, eps = self.observed, self.model.config.rms_norm_eps
        torch.ops.outrider.observe_block(
            hidden, features.positions, features.slots, self.cos_sin, *zip(*pools, strict=True),
            weights.packed, weights.kinds, weights.outputs, self.observed_norms, eps,
        )  # fmt: skip

    def propose(
        self, pools: Pools, batch: DraftBatch, gamma: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Tokens [R, gamma], probs [R, gamma, V'] (None: all greedy or not asked for), confidence [R, gamma]."""
        config, weights = self.model.config, self.draft
        embedded = torch.cat([self.embedding[batch.anchors].to(self.mask.dtype), self.mask])
        return torch.ops.outrider.propose_block(
            batch.anchors, batch.seq_lens, batch.rows, batch.page_table, *batch.rules,
            batch.keys[:, :gamma].contiguous(), embedded, self.cos_sin, *zip(*pools, strict=True),
            weights.packed, weights.kinds, weights.outputs, self.draft_norms, self.w1, self.sure, self.vocab,
            gamma, config.first_row, config.rms_norm_eps, batch.wants_probs,
        )  # fmt: skip


def compile_block(model: BlockModel, embedding: Rows, head: torch.Tensor) -> CompiledBlock | None:
    """Prepare a model once; None where the compiled kernels are missing or do not know its shape.

    embedding: [V, d] of the target. head: [V', d], the target's rows that the model drafts from.
    """
    config, markov = model.config, model.markov_head
    known = (markov is None or type(markov) is MarkovHead) and config.head_dim % 32 == 0
    even = config.hidden_size % 16 == 0 and config.intermediate_size % 16 == 0 and config.markov_rank % 2 == 0
    if not (known and even and native.fits(model.fc.weight, head)):
        return None
    layers, w1 = model.draft_layers, None
    products = [w.weight for layer in layers for w in (layer.qkv, layer.o_proj, layer.gate_up, layer.down_proj)]
    draft = [prepare(weight) for weight in (*products, head)]
    if markov is not None:
        w1 = markov.w1.weight
        draft.append(pack(markov.w2.weight))
    half, table = config.head_dim // 2, Rotary(config.head_dim, config.rope_theta, config.max_positions).table
    norms = [n.weight for x in layers for n in (x.input_layernorm, x.q_norm, x.k_norm, x.post_attention_layernorm)]
    keys_values = torch.cat([layer.qkv.weight[layer.heads * layer.dim :] for layer in layers])
    return CompiledBlock(
        model=model,
        embedding=embedding,
        mask=embedding[torch.tensor([config.mask_token_id])].to(model.fc.weight.dtype),
        cos_sin=torch.cat([table[:, :half], table[:, -half:]], 1),
        draft=Weights(*draft),
        observed=Weights(prepare(model.fc.weight), prepare(keys_values)),
        draft_norms=[*norms, model.norm.weight],
        observed_norms=[model.hidden_norm.weight, *(layer.k_norm.weight for layer in layers)],
        w1=w1,
        sure=confidence_weights(model),
        vocab=model.vocab if config.draft_vocab_size else None,
    )


def confidence_weights(model: BlockModel) -> list[torch.Tensor]:
    """The confidence head's weight of a hidden state [d] and what it adds for each token before [V]; or nothing."""
    head, markov, size = model.confidence_head, model.markov_head, model.config.hidden_size
    if head is None:
        return []
    weight, constant = head.proj.weight[0].float(), head.proj.bias.float()
    if markov is None or not head.with_markov:
        return [weight[:size].contiguous(), constant.repeat(model.config.vocab_size)]
    return [weight[:size].contiguous(), markov.w1.weight.float() @ weight[size:] + constant]
