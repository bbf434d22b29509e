"""Common base of drafters that encode the text themselves: which tokens a step encodes, and for whom it drafts.

`observe` only stores tokens; `propose`, which has the page table, encodes new tokens of the requests it drafts for. The
state of a slot depends only on the tokens up to it. So shared prefixes, chunked prompts, resumed requests and steps
without drafts need one rule: encode from the first position that is not encoded yet.

On a CPU the host reads how many tokens are new. On a device the host does not know. A prefill encodes as many tokens as
the target has just read. A step that drafts encodes a number of tokens fixed by its number of requests, padding
included. All requests take part, masked or not. The number covers all tokens that a step can commit, so no backlog
arises while drafting; a request with a backlog from before gets drafts of length 0 until it is encoded.
"""

from abc import abstractmethod
from dataclasses import replace

import torch

from .base import Draft, DraftBatch, Drafter, Features, Prefilled, Rows
from .slot_tokens import SlotTokens
from .spans import Spans, first_missing, shares

BACKLOG, BACKLOG_EACH = 256, 16
"""Most tokens encoded in a step on a CPU: in all, or per request if that is more."""
ROOM, MOST = 256, 64
"""Most tokens encoded in a step on a device: of all requests together (more if the step can commit more), and of one
request. All are computed, padding included; up to a few hundred rows cost no more than reading the weights."""


class EncodingDrafter(Drafter):
    """A drafter that keeps its own state for every token of a text.

    embedding: [V, d], read in `dtype`. device: where it works. on_host: whether that is a CPU.
    block: positions of each request, from the anchor's on, that the first pass of a draft computes.
    """

    embedding: Rows
    dtype: torch.dtype
    device: torch.device
    on_host: bool
    block: int

    def allocate(self, slots: int) -> None:
        self.tokens = SlotTokens(slots, self.device)
        self.encoded = torch.zeros(slots, dtype=torch.bool, device=self.device)

    def slot_state(self) -> list[torch.Tensor]:
        return [self.tokens.tokens, self.encoded]

    def observe(self, features: Features) -> None:
        self.tokens.write(features.slots, features.tokens)
        self.encoded.index_fill_(0, features.slots, False)

    @torch.inference_mode()
    def prefilled(self, chunks: Prefilled) -> None:
        """On a device, encode as many tokens as the chunks have, each request's oldest missing ones."""
        if self.on_host:
            return
        room, most = sum(chunks.counts), max(chunks.counts)
        first, count = self._share(chunks.page_table, chunks.rows, chunks.seq_lens, chunks.longest, room, most)
        where = chunks.page_table, chunks.rows, first, count
        # longest=None: with a bound, torch's attention would compare every pair of positions.
        self._encode(Spans.padded(*where, size=room, most=most, longest=None))

    @torch.inference_mode()
    def propose(self, batch: DraftBatch) -> Draft:
        if not self.on_host:
            return self._propose_each(batch)
        mask = torch.ones_like(batch.rows) if batch.draft_mask is None else batch.draft_mask
        selected = mask.nonzero()[:, 0]
        if len(selected) == 0:
            return Draft.nothing(0, self.gamma, self.device).spread(selected, batch.anchors)
        some = batch if len(selected) == len(batch.rows) else batch.select(selected)
        first, count = self._next(some)
        ready = (first + count == some.seq_lens).nonzero()[:, 0]
        behind = count.nonzero()[:, 0]
        new = None
        if len(behind):
            new = Spans.of(some.page_table, some.rows[behind], first[behind], count[behind])
        if len(ready) == len(selected) == len(batch.rows):
            return self._draft(some, self._block(some), new)
        if len(ready):
            those = some.select(ready)
            drafted = self._draft(those, self._block(those), new)
        else:
            if new is not None:
                self._encode(new)
            drafted = Draft.nothing(0, self.gamma, self.device)
        return drafted.spread(selected[ready], batch.anchors, drafting=len(selected))

    def _propose_each(self, batch: DraftBatch) -> Draft:
        """Draft for all; masked requests and texts not yet encoded get length 0, without waiting for the device."""
        requests, where = len(batch.rows), (batch.page_table, batch.rows)
        longest = int(batch.seq_lens.max()) + 1 if batch.longest is None else batch.longest
        committed = self.gamma + 1  # tokens of a request that a step can commit
        most = max(MOST, committed)
        room = max(min(ROOM, most * requests), committed * requests)
        first, count = self._share(*where, batch.seq_lens, longest, room, most)
        new = Spans.padded(*where, first, count, size=room, most=most, longest=longest)
        made = self._draft(batch, Spans.blocks(*where, batch.seq_lens, self.block, longest), new)
        ready = first + count == batch.seq_lens
        if batch.draft_mask is not None:
            ready &= batch.draft_mask
        return replace(made, lens=made.lens * ready, confidence=made.confidence.masked_fill(~ready[:, None], 0.0))

    def _share(
        self, page_table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, longest: int, room: int, most: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `_next` for texts of these lengths [R], at most `room` tokens in all and `most` of one. Works on any
        device without waiting for it."""
        first = first_missing(self.encoded, page_table, rows, lengths, longest)
        return first, shares(lengths - first, room, most)

    def _next(self, batch: DraftBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [R] the first position of each request to encode, and [R] the tokens in this step: short backlogs
        first."""
        ends = batch.seq_lens
        first = first_missing(self.encoded, batch.page_table, batch.rows, ends, None)
        backlog, bound = ends - first, max(BACKLOG, BACKLOG_EACH * len(ends))
        return first, backlog if int(backlog.sum()) <= bound else shares(backlog, bound, bound)

    def _block(self, batch: DraftBatch) -> Spans:
        return Spans.of(batch.page_table, batch.rows, batch.seq_lens, torch.full_like(batch.seq_lens, self.block))

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[ids].to(self.dtype)

    def _inputs(self, new: Spans) -> torch.Tensor:
        """Return the embeddings [N, d] of the tokens at these positions."""
        return self._embed(self.tokens.tokens[new.slots].long())

    @abstractmethod
    def _encode(self, new: Spans) -> None:
        """Encode without drafting."""

    @abstractmethod
    def _draft(self, batch: DraftBatch, block: Spans, new: Spans | None) -> Draft:
        """Draft for all requests of the batch; all their context but `new` is encoded.

        block: the first positions after the contexts, see the attribute `block`.
        new: positions to encode, of these and perhaps other requests.
        """
