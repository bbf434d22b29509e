"""DEER and SpecDiff behind the drafter contract: a diffusion drafter of one denoising step, or of several.

Both are one network, a small language model over the tokens, which asks the target for nothing but embedding and head.
Keys and values stand at the target's KV slots. `observe` only notes tokens; `propose`, which has the page table,
encodes what is new of the requests it drafts for, in the same products as their blocks. What a slot holds depends on
the tokens up to it alone, so a prefix of another request, a prompt read in pieces, a request that comes back and steps
that did not draft leave nothing to be done but to encode from the first position that is not encoded yet.

On a CPU the host looks how much that is. On a device it does not know: prompts are encoded when they are prefilled, as
many tokens as the target has just read, and every step that drafts encodes as many for each number of requests, part of
them padding. All requests take part, asked for or not. What a step can commit always fits, so that those whose text is
encoded stay so; the others get drafts of length 0 until it is encoded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from outrider.kernels.attention import flat_attention

from ..base import Draft, DraftBatch, Drafter, Features, Prefilled, Rows, Target
from ..block.checkpoint import check_shapes, check_target, load_as, target_identity
from ..slot_tokens import SlotTokens
from .compiled import Pools, compile_diffusion
from .denoise import denoise, make_schedule
from .model import DiffusionModel
from .spans import Spans, first_missing, shares, torch_first_missing

BACKLOG, BACKLOG_EACH = 256, 16
"""Tokens encoded in a step at most: of all requests together, or for each request where that is more."""
ROOM, MOST = 256, 64
"""Tokens that a step on a device encodes at most: of all requests together, unless the step can commit more, and of one
request. All of it is computed, padding included; up to a few hundred rows cost no more than reading the weights."""


class DiffusionDrafter(Drafter):
    """Drafts a block in `denoising_steps` forward passes.

    embedding, head: [V, d] of the target, used in place; only the head's rows of the draft vocabulary are copied.
    gamma: tokens per block, at most what the model was trained for, which is the default.
    denoising_order: a name of `denoise.SCHEDULES`.
    """

    def __init__(
        self,
        model: DiffusionModel,
        *,
        embedding: Rows,
        head: Rows,
        gamma: int | None = None,
        denoising_steps: int = 1,
        denoising_order: str = "left",
    ) -> None:
        config = model.config
        check_shapes(config, embedding, head, gamma)
        self.model = model.requires_grad_(False).eval()
        self.gamma = gamma or config.gamma
        self.schedule = make_schedule(denoising_order, self.gamma, denoising_steps)
        self.dtype, self.device = model.norm.weight.dtype, model.norm.weight.device
        self.on_host = model.norm.weight.is_cpu
        self.embedding = embedding
        self.vocab = model.vocab if config.draft_vocab_size else None
        self.head = head[model.vocab.to(head.device)].to(self.dtype)
        self.compiled = compile_diffusion(self.model, self.head)
        self.pools: Pools = []
        self.tokens = SlotTokens(0)
        self.encoded = torch.zeros(0, dtype=torch.bool)

    @classmethod
    def load(
        cls,
        target: Target,
        checkpoint: str | Path,
        *,
        gamma: int | None = None,
        denoising_steps: int = 1,
        denoising_order: str = "left",
    ) -> DiffusionDrafter:
        """Load a checkpoint folder for a target; raises CheckpointError when it does not fit."""
        embedding, head = target.weights()
        model = load_as(DiffusionModel, checkpoint, dtype=target.dtype, device=embedding.device)
        check_target(model.config, target_identity(target.config, embedding))
        return cls(
            model, embedding=embedding, head=head, gamma=gamma, denoising_steps=denoising_steps,
            denoising_order=denoising_order,
        )  # fmt: skip

    def allocate(self, slots: int) -> None:
        config, like = self.model.config, self.model.norm.weight
        shape = slots, config.num_kv_heads, config.head_dim
        self.pools = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(config.num_layers)]
        if self.compiled is not None:
            self.compiled.allocate(self.pools)
        self.tokens = SlotTokens(slots, self.device)
        self.encoded = torch.zeros(slots, dtype=torch.bool, device=self.device)

    def observe(self, features: Features) -> None:
        self.tokens.write(features.slots, features.tokens)
        self.encoded.index_fill_(0, features.slots, False)

    @torch.inference_mode()
    def prefilled(self, chunks: Prefilled) -> None:
        """Encode chunks of prompts at once on a device; an older backlog goes first, in their place."""
        if self.on_host:
            return
        room, most = sum(chunks.counts), max(chunks.counts)
        first, count = self._share(chunks.page_table, chunks.rows, chunks.seq_lens, chunks.longest, room, most)
        where = chunks.page_table, chunks.rows, first, count
        # Without a bound of the contexts: torch's attention, where it has to do, would look at each for each.
        self._encode(Spans.padded(*where, size=room, most=most, longest=None))

    @torch.inference_mode()
    def propose(self, batch: DraftBatch) -> Draft:
        if not self.on_host:
            return self._propose_each(batch)
        mask = torch.ones_like(batch.rows) if batch.draft_mask is None else batch.draft_mask
        selected = mask.nonzero()[:, 0]
        if len(selected) == 0:
            return self._nothing(0).spread(selected, batch.anchors)
        some = batch if len(selected) == len(batch.rows) else batch.select(selected)
        first, count = self._next(some)
        ready = (first + count == some.seq_lens).nonzero()[:, 0]
        new = self._new(some, first, count)
        if len(ready) == len(selected) == len(batch.rows):
            return self._draft(some, self._block(some), new)
        if len(ready):
            those = some.select(ready)
            drafted = self._draft(those, self._block(those), new)
        else:
            self._encode(new)
            drafted = self._nothing(0)
        return drafted.spread(selected[ready], batch.anchors, drafting=len(selected))

    def _propose_each(self, batch: DraftBatch) -> Draft:
        """Drafts for all, of length 0 where none was asked for or the text is not encoded: which these are, the host
        need not know."""
        requests, where = len(batch.rows), (batch.page_table, batch.rows)
        longest = int(batch.seq_lens.max()) + 1 if batch.longest is None else batch.longest
        committed = self.gamma + 1  # tokens of a request that a step can commit
        most = max(MOST, committed)
        room = max(min(ROOM, most * requests), committed * requests)
        first, count = self._share(*where, batch.seq_lens, longest, room, most)
        new = Spans.padded(*where, first, count, size=room, most=most, longest=longest)
        made = self._draft(batch, Spans.blocks(*where, batch.seq_lens, self.gamma, longest), new)
        ready = first + count == batch.seq_lens
        if batch.draft_mask is not None:
            ready &= batch.draft_mask
        return replace(made, lens=made.lens * ready, confidence=made.confidence.masked_fill(~ready[:, None], 0.0))

    def _share(
        self, page_table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, longest: int, room: int, most: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`_next` of texts of these lengths [R] where there is so much room for all, and for one at most; on any device
        and without waiting for it."""
        first = torch_first_missing(self.encoded, page_table, rows, lengths, longest)
        return first, shares(lengths - first, room, most)

    def _next(self, batch: DraftBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """[R] where each request is to be encoded from, and how many tokens in this step: short backlogs first."""
        ends = batch.seq_lens
        first = first_missing(self.encoded, batch.page_table, batch.rows, ends)
        backlog, bound = ends - first, max(BACKLOG, BACKLOG_EACH * len(ends))
        return first, backlog if int(backlog.sum()) <= bound else shares(backlog, bound, bound)

    def _new(self, batch: DraftBatch, first: torch.Tensor, count: torch.Tensor) -> Spans | None:
        """The tokens that are encoded in this step."""
        some = count.nonzero()[:, 0]
        return Spans.of(batch.page_table, batch.rows[some], first[some], count[some]) if len(some) else None

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[ids].to(self.dtype)

    def _encode(self, new: Spans | None) -> None:
        """Encode without drafting."""
        if new is not None:
            self._pass(self._inputs(new), new, None, slice(0, 0))

    def _inputs(self, new: Spans) -> torch.Tensor:
        return self._embed(self.tokens.tokens[new.slots].long())

    def _block(self, batch: DraftBatch) -> Spans:
        return Spans.of(batch.page_table, batch.rows, batch.seq_lens, torch.full_like(batch.seq_lens, self.gamma))

    def _draft(self, batch: DraftBatch, block: Spans, new: Spans | None) -> Draft:
        """Blocks for all requests of the batch, whose context is encoded but for what is `new`."""
        requests, size = len(batch.rows), self.gamma

        def predict(
            tokens: torch.Tensor, revealed: torch.Tensor, columns: slice
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            nonlocal new
            ids = torch.cat([batch.anchors[:, None], tokens[:, :-1]], 1)
            inputs = self._embed(ids.flatten()).view(requests, size, -1)
            inputs = self.model.block_inputs(inputs, revealed[:, :-1]).flatten(0, 1)
            if new is not None:
                inputs = torch.cat([self._inputs(new), inputs])
            hidden, logits = self._pass(inputs, new, block, columns)
            new = None
            sure = self.model.confidence_head
            chances = None if sure is None else torch.sigmoid(sure(hidden, hidden).float()).view(requests, -1)
            return logits.view(requests, columns.stop - columns.start, -1), chances

        tokens, probs, confidence = denoise(
            predict, self.schedule, batch.rules, batch.keys[:, :size], vocab=self.vocab, wants_probs=batch.wants_probs,
            all_greedy=batch.all_greedy,
        )  # fmt: skip
        return Draft(
            tokens=tokens,
            lens=torch.full((requests,), size, dtype=torch.int64, device=self.device),
            confidence=confidence,
            probs=probs,
            vocab=None if probs is None else self.vocab,
            drafting=requests,
        )

    def _pass(
        self, x: torch.Tensor, new: Spans | None, block: Spans | None, columns: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States [R * M, d] and logits [R * M, V'] of the M `columns` of each block, of inputs x [N, d]: rows of new
        context, which is encoded then, and of the blocks. Keys and values of both go to their slots."""
        spans = [span for span in (new, block) if span is not None]
        positions, slots = (
            (spans[0].positions, spans[0].slots)
            if len(spans) == 1
            else (torch.cat([s.positions for s in spans]), torch.cat([s.slots for s in spans]))
        )
        positions = positions.clamp(max=self.model.config.max_positions - 1)  # what lies behind an answer may be beyond
        if self.compiled is not None:
            found = self.compiled.forward(x, positions, slots, new, block, columns)
        else:
            found = self._plain_pass(x, positions, slots, spans, new, columns)
        if new is not None:
            self.encoded.index_fill_(0, new.slots, True)
        return found

    def _plain_pass(
        self, x: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, spans: list[Spans], new: Spans | None,
        columns: slice,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """The same in plain torch."""

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self.pools[layer]
            keys[slots], values[slots] = k, v
            rows = q.split([len(span.slots) for span in spans])
            scale = self.model.config.head_dim**-0.5
            return torch.cat(
                [
                    flat_attention(part, keys, values, span.batch, scale=scale, causal=span is new)
                    for part, span in zip(rows, spans, strict=True)
                ]
            )

        hidden = self.model(x, positions, attend)[0 if new is None else len(new.slots) :]
        hidden = hidden.unflatten(0, (len(hidden) // self.gamma, self.gamma))[:, columns].flatten(0, 1)
        return hidden, hidden @ self.head.T

    def _nothing(self, requests: int) -> Draft:
        shape = requests, self.gamma
        none = torch.zeros(shape, dtype=torch.int64, device=self.device)
        return Draft(none, none[:, 0], torch.zeros(shape, device=self.device))
