"""Accepting and committing at the end of the target's verification graph.

The captured kernels run at every replay, the same for greedy, seeded and sampled requests. All randomness comes from
seeds and positions. If a batch has logit rules, or its q is not in the buffer that the graph reads, the graph writes
its tokens to the unused slot 0, and the worker accepts itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from outrider.drafters.graphs import HeldRules
from outrider.kernels.acceptance import Verification, accept_logits
from outrider.kernels.noise import Purpose, streams, uniforms
from outrider.kernels.ragged import FlatVerify, commit, copy_all
from outrider.kernels.sampling import Rules
from outrider.scheduler.buckets import TokenBuckets

from .flatten import StepBatch
from .logit_rules import has_rules

if TYPE_CHECKING:  # tests/gpu/kernels run without SGLang
    from outrider.drafters.base import Draft

    from .sampling import Sampling

Observe = Callable[[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes hidden states, tokens, positions and slots [T]."""


class VerifyTail:
    """observe: passes committed tokens to parts with state by slot; slot 0 belongs to no request.

    room: of `Drafter.reserve_probs`; None: every q is a point mass. by_block: as in `Verification`.
    """

    def __init__(
        self, buckets: TokenBuckets, observe: Observe, device: Any,
        room: tuple[torch.Tensor, torch.Tensor | None] | None = None, *, by_block: bool = True,
    ):  # fmt: skip
        tokens = buckets.graphs[-1]
        slots = buckets.slots(tokens)
        self._buckets, self._observe, self._by_block = buckets, observe, by_block
        self._q: torch.Tensor | None
        self._vocab: torch.Tensor | None
        self._q, self._vocab = (None, None) if room is None else room
        self._drafts = torch.zeros((slots, buckets.width - 1), dtype=torch.int64, device=device)
        self._lens, self._begins, self._zeros = torch.zeros((3, slots), dtype=torch.int64, device=device)
        self._total, self._gate = torch.zeros((2, 1), dtype=torch.int64, device=device)
        self._request, self._step = torch.zeros((2, tokens), dtype=torch.int64, device=device)
        self._points = torch.ones(slots, dtype=torch.bool, device=device)
        self._rules = HeldRules(slots, device)
        self._opened: bool | tuple[int, int, Sampling] = False  # requests, tokens and sampling of anchors alone
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._results: dict[int, torch.Tensor] = {}

    def capture(self, runner: Any, output: Any, batch: Any, tokens: int) -> None:
        """Capture the tail. SGLang calls this after the captured forward of `tokens` tokens."""
        count, request, step = batch.batch_size, self._request[:tokens], self._step[:tokens]
        drafts, lens, anchors = self._drafts[:count], self._lens[:count], batch.seq_lens.long()
        held = self._rules.of(count)
        seeds, rules = held["seeds"], Rules(*(held[name] for name in Rules._fields))
        verification = Verification(
            drafts, lens, torch.cat([self._begins[:count], self._total]),
            uniforms=uniforms(streams(seeds, anchors, Purpose.ACCEPT), drafts.shape[1]),
            final_keys=streams(seeds, anchors, Purpose.FINAL),
            decided=held["decided"], draft_probs=self._q, vocab=self._vocab, by_block=self._by_block,
            points=None if self._q is None else self._points[:count],
        )  # fmt: skip
        keys = streams(seeds[request], batch.positions.long() + 1, Purpose.TOKEN)
        accept_lens, accepted = accept_logits(verification, request, output.next_token_logits, rules, keys)
        slots = batch.out_cache_loc * self._gate
        new_seq_lens, bonus, slots = commit(accept_lens, accepted, anchors, request, step, slots)
        self._observe(output.hidden_states, batch.input_ids, batch.positions, slots)
        filler = self._zeros[: count % 2]  # so that each part begins at a multiple of 16 bytes
        parts = accepted, accept_lens, new_seq_lens, bonus
        self._results[tokens] = torch.cat([each for part in parts for each in (part.flatten(), filler)])

    def takes(self, batch: StepBatch) -> bool:
        """Return True if the graph of the verification can accept and commit the step, and prepare its next replay for
        it; else make the next replay write no results."""
        draft, sampling, verify_lens, flat = batch.draft, batch.sampling, batch.verify_lens, batch.flat
        ruled = has_rules(batch.scheduled.reqs, batch.scheduled.sampling_info)
        graph = self._buckets.has_graph(len(verify_lens), len(flat.request))
        readable = draft.probs is None or draft.probs is self._q or sampling.all_decided
        if ruled or not (readable and graph):
            self.close()
            return False
        self.open(draft, sampling, verify_lens, flat, alone=batch.alone)
        return True

    def open(
        self, draft: Draft, sampling: Sampling, verify_lens: torch.Tensor, flat: FlatVerify, *, alone: bool = False
    ) -> None:
        """Make the next replay accept and commit this batch of R requests. verify_lens: [R]. alone: the host knows that
        they are 0, so batches of one size are prepared once."""
        count, tokens = len(verify_lens), len(flat.request)
        if alone and self._opened == (count, tokens, sampling):
            return
        nothing = self._zeros[count:]  # a slot without a request reads the first row
        copy_all([
            (self._drafts[:count], draft.tokens.contiguous()),
            (self._lens[:count], verify_lens), (self._lens[count:], nothing),
            (self._begins[:count], flat.qo_indptr[:-1]), (self._begins[count:], nothing),
            (self._total, flat.qo_indptr[-1:]), (self._gate, self._one),
            (self._request[:tokens], flat.request), (self._step[:tokens], flat.step),
        ])  # fmt: skip
        if self._q is not None and not sampling.all_decided:
            if draft.probs is None or draft.points is None:
                self._points.fill_(draft.probs is None)
            else:
                self._points[:count].copy_(draft.points)
        self._rules.take(sampling)
        self._opened = (count, tokens, sampling) if alone else True

    def close(self) -> None:
        """Make the next replay write no results."""
        if self._opened:
            for left in (self._gate, self._total, self._lens, self._begins, self._request):  # beyond a smaller bucket
                left.zero_()
            self._opened = False

    def results(self, requests: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return results of the last replay, of a bucket of `tokens`: accept_lens [R], tokens [R, gamma+1], and cached
        tokens and anchors [R] of the next step."""
        kept = self._results[tokens].clone()  # the next replay overwrites them
        slots, width = self._buckets.slots(tokens), self._buckets.width
        even = slots + slots % 2
        begin = len(kept) - 3 * even
        accept_lens, new_seq_lens, bonus = (kept[begin + i * even :][:requests] for i in range(3))
        return accept_lens, kept[: requests * width].view(requests, width), new_seq_lens, bonus
