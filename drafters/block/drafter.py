"""DSpark and DFlash as a `Drafter`.

The draft cache holds one key and value per layer for every KV slot of the target. `observe` fills the slots of
processed tokens from the target's features. `propose` writes the block's own keys and values to the slots after the
sequence; committed tokens overwrite them. There is no other state, so a prefix hit, a chunked prefill or a step that
verified no draft needs no special case.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from outrider.kernels.attention import MOST_CUDA_HEAD, flat_attention
from outrider.kernels.cuda import native as cuda
from outrider.kernels.flat_batch import FlatBatch

from ..base import Draft, DraftBatch, Drafter, Features, Rows, Target
from ..config_file import CheckpointError
from .checkpoint import check_shapes, check_target, target_identity
from .checkpoint import load as load_model
from .compiled import compile_block
from .layers import DraftLayer
from .model import BlockModel
from .sampling import sample_block, sample_parallel, sample_path

Block = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
"""Tokens, probs and confidence of `Draft`."""


class BlockDrafter(Drafter):
    """Drafts a block with one forward pass of a DSpark or DFlash model; on a CPU the block is cut to
    `DraftBatch.depth`.

    embedding, head: [V, d] of the target, used in place; only the head's rows of a truncated vocabulary are copied.
    gamma: tokens per block, at most the number that the model was trained for, which is the default.
    """

    def __init__(self, model: BlockModel, *, embedding: Rows, head: Rows, gamma: int | None = None) -> None:
        config = model.config
        check_shapes(config, embedding, head, gamma)
        self.model = model.requires_grad_(False).eval()
        self.gamma = gamma or config.gamma
        self.shortens = model.fc.weight.is_cpu
        self.assesses_itself = not config.confidence_head
        self.target_layers = config.target_layers
        self.dtype, self.device = model.fc.weight.dtype, model.fc.weight.device
        self.embedding = embedding
        self.vocab = model.vocab if config.draft_vocab_size else None
        if isinstance(head, torch.Tensor) and self.vocab is None:
            self.head = head[: config.logit_size].to(self.dtype)
        else:
            self.head = head[model.vocab.to(head.device)].to(self.dtype)
        self._target_head = head
        self.compiled = compile_block(self.model, embedding, self.head)
        self.pools: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.contexts: torch.Tensor | None = None  # [slots, d] of `BlockModel.context`, where a head reads it

    @classmethod
    def load(cls, target: Target, checkpoint: str | Path, *, gamma: int | None = None) -> BlockDrafter:
        """Load a checkpoint folder for a target; raises CheckpointError where it does not fit."""
        embedding, head = target.weights()
        model = load_model(checkpoint, dtype=target.dtype, device=embedding.device)
        check_target(model.config, target_identity(target.config, embedding))
        return cls(model, embedding=embedding, head=head, gamma=gamma)

    def allocate(self, slots: int) -> None:
        config = self.model.config
        shape = (slots, config.num_kv_heads, config.head_dim)
        like = self.model.fc.weight
        self.pools = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(config.num_layers)]
        if self.compiled is not None:
            self.compiled.allocate(self.pools)
        if self.model.lilicorr is not None:
            self.contexts = like.new_zeros(slots, config.hidden_size)
        if self._rotates(self.model.vocab):  # its kernel is compiled before the first prompt comes
            nowhere = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._store_context(like.new_zeros(1, config.hidden_size), nowhere, nowhere)

    def slot_state(self) -> list[torch.Tensor]:
        contexts = [] if self.contexts is None else [self.contexts]
        return [pool for pair in self.pools for pool in pair] + contexts

    @torch.inference_mode()
    def reserve_probs(self, requests: int) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        if self.model.config.head_dim > MOST_CUDA_HEAD or not cuda.fits(self.head):
            return None  # torch's attention reads whole contexts
        return torch.zeros((requests, self.gamma, self.model.config.logit_size), device=self.device), self.vocab

    @torch.inference_mode()
    def reload(self, checkpoint: str, number: int = 0) -> None:
        """Exchange the weights in place, where CUDA graphs read them. The draft vocabulary may change, but not its
        size."""
        if number:
            raise ValueError("a block drafter has one set of weights; `WeightSets` has several")
        model = self._of_this_shape(checkpoint)
        for ours, loaded in zip(self.model.parameters(), model.parameters(), strict=True):
            ours.copy_(loaded)
        self.model.vocab.copy_(model.vocab)
        if self.vocab is not None:
            self.head.copy_(self._target_head[model.vocab.to(self._target_head.device)])
        if self.compiled is not None:
            self.compiled = compile_block(self.model, self.embedding, self.head)
            if self.compiled is not None and self.pools:
                self.compiled.allocate(self.pools)

    def beside(self, checkpoint: str) -> BlockDrafter:
        """Create a drafter with the weights of another checkpoint folder on the allocated draft state of this one.
        Raises ValueError where it does not fit."""
        model = self._of_this_shape(checkpoint)
        made = BlockDrafter(model, embedding=self.embedding, head=self._target_head, gamma=self.gamma)
        made.pools, made.contexts = self.pools, self.contexts
        if made.compiled is not None:
            made.compiled.allocate(made.pools)
        return made

    def _of_this_shape(self, checkpoint: str) -> BlockModel:
        model = load_model(checkpoint, dtype=self.dtype, device=self.device)
        if model.config != self.model.config:
            raise CheckpointError(f"the drafter {checkpoint} has another shape than the one that serves")
        return model

    @torch.inference_mode()
    def observe(self, features: Features) -> None:
        if features.hidden is None:
            raise ValueError(f"a block drafter needs the outputs of target layers {list(self.target_layers)}")
        if len(features.slots) == 0:
            return
        if self.compiled is not None:
            context = self.compiled.observe(features)
        else:
            context = self.model.context(features.hidden.to(self.dtype))
            self._store_context(context, features.positions, features.slots)
        if self.contexts is not None:
            self.contexts[features.slots] = context

    def _store_context(self, context: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Store the keys and values of `context` [N, d] at positions [N] in slots [N]."""
        if self._rotates(slots):
            for number, layer in enumerate(self.model.draft_layers):
                self._rotate_and_store(number, layer, layer.projected_context(context), positions, slots)
            return
        for (keys, values), (k, v) in zip(self.pools, self.model.keys_values(context, positions), strict=True):
            keys[slots] = k
            values[slots] = v

    def _rotates(self, slots: torch.Tensor) -> bool:
        """Return True if one CUDA kernel norms, rotates and stores keys."""
        return not self.model.config.gemma and cuda.fits(slots)

    def _rotate_and_store(
        self, number: int, layer: DraftLayer, projected: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Store keys and values of `DraftLayer.projected` in slots [N]; return q [N, Hq, D]."""
        q_weight, k_weight = (getattr(norm, "weight", None) for norm in (layer.q_norm, layer.k_norm))
        q: torch.Tensor = cuda.rotated.rotate_and_store(
            projected, self.model.rotary.table, positions, slots, q_weight, k_weight, self.model.config.rms_norm_eps,
            *self.pools[number],
        )  # fmt: skip
        return q

    @torch.inference_mode()
    def propose(self, batch: DraftBatch) -> Draft:
        if not batch.anchors.is_cpu:
            return self._propose_each(batch)
        if batch.draft_mask is not None and not bool(batch.draft_mask.all()):
            requests = batch.draft_mask.nonzero()[:, 0]
            some = self.propose(batch.select(requests)) if len(requests) else Draft.nothing(0, self.gamma, self.device)
            return some.spread(requests, batch.anchors)
        gamma = self.gamma if batch.depth is None else min(batch.depth, self.gamma)
        if self.compiled is None:
            block = self._propose(batch, gamma)
        elif self.model.config.choosing is None:
            block = self.compiled.propose(batch, gamma)
        else:
            block = self._draw(*self.compiled.forward(batch, gamma), batch)
        made = Draft.of(*block, self.vocab)
        return made if gamma == self.gamma else made.widened(self.gamma)

    def _propose_each(self, batch: DraftBatch) -> Draft:
        """Draft for all requests, with length 0 outside the draft mask, so that the host need not read the mask."""
        made = Draft.of(*self._propose(batch), self.vocab)
        return made if batch.draft_mask is None else replace(made, lens=made.lens * batch.draft_mask)

    def _propose(self, batch: DraftBatch, gamma: int | None = None) -> Block:
        """Return the tokens, probs and confidence of `Draft`, in plain torch; gamma: tokens, None: all."""
        config, requests = self.model.config, len(batch.anchors)
        queries = (gamma or self.gamma) + config.first_row
        ids = batch.anchors.new_full((requests, queries), config.mask_token_id)
        ids[:, 0] = batch.anchors
        positions = batch.seq_lens[:, None] + torch.arange(queries, device=self.device)
        slots = batch.page_table[batch.rows[:, None], positions].flatten().long()
        flat = FlatBatch(
            qo_indptr=torch.arange(requests + 1, dtype=torch.int32, device=self.device) * queries,
            kv_lens=(batch.seq_lens + queries).to(torch.int32),
            rows=batch.rows,
            page_table=batch.page_table,
            most_queries=queries,
            longest=None if batch.longest is None else batch.longest + queries,
        )
        scale = 1.0 if config.gemma else config.head_dim**-0.5

        def attended(number: int, q: torch.Tensor) -> torch.Tensor:
            window = config.window(number)
            causal = window >= 0 and not config.open_windows
            return flat_attention(q, *self.pools[number], flat, scale=scale, causal=causal, window=window)

        def attend(number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self.pools[number]
            keys[slots] = k
            values[slots] = v
            return attended(number, q)

        def attend_rotated(number: int, layer: DraftLayer, x: torch.Tensor) -> torch.Tensor:
            projected = layer.projected(x, queries)
            return attended(number, self._rotate_and_store(number, layer, projected, turned, slots))

        embedded = self.embedding[ids.flatten()].to(self.dtype)
        if config.gemma:
            embedded = embedded * config.hidden_size**0.5
        turned = positions.flatten().clamp(max=config.max_positions - 1)  # positions after an answer's end
        if self._rotates(slots):
            hidden = self.model.through(embedded, attend_rotated, queries)
        else:
            hidden = self.model(embedded, turned, attend, queries)
        hidden = hidden.view(requests, queries, -1)
        hidden = hidden[:, config.first_row :].flatten(0, 1)  # a product of three dimensions may copy the head
        logits = hidden @ self.head.T
        return self._draw(logits.view(requests, -1, logits.shape[1]), hidden.view(requests, -1, hidden.shape[1]), batch)

    def _draw(self, logits: torch.Tensor, hidden: torch.Tensor, batch: DraftBatch) -> Block:
        """Draw the block from logits [R, G, V'] and hidden states [R, G, d], in plain torch."""
        config = self.model.config
        if config.choosing is not None and (config.logit_scale, config.logit_cap) != (1.0, 0.0):
            logits = logits.float() * config.logit_scale
        if config.logit_cap:
            logits = (logits / config.logit_cap).tanh() * config.logit_cap
        if config.choosing is not None:
            return sample_path(*self._candidates(logits, hidden, batch), batch, vocab_size=config.vocab_size)
        if self.model.markov_head is None:
            return sample_parallel(logits, batch, vocab=self.vocab)
        markov, confidence = self.model.markov_head, self.model.confidence_head
        return sample_block(logits, hidden, batch, vocab=self.vocab, markov=markov, confidence=confidence)

    def _candidates(
        self, logits: torch.Tensor, hidden: torch.Tensor, batch: DraftBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return candidates and scores for `sample_path`, from logits [R, G, V] and hidden states [R, G, d]."""
        if self.model.candidate_selector is not None:
            return self.model.candidate_selector(logits, hidden, batch.anchors)
        assert self.model.lilicorr is not None
        assert self.contexts is not None
        before = batch.page_table[batch.rows, batch.seq_lens - 1].long()
        return self.model.lilicorr(logits, hidden, self.embedding, self.contexts[before])
