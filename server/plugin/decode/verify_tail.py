"""Accepting and committing at the end of the target's verification graph.

The captured kernels run at every replay, the same for greedy, seeded and sampled requests. All randomness comes from
seeds and positions. If a batch has logit rules, or its q is not in the buffer that the graph reads, the graph writes
its tokens to the unused slot 0, and the worker accepts itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

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
NO_TOP_K = 1 << 30


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
        self._lens, self._begins, self._seeds = torch.zeros((3, slots), dtype=torch.int64, device=device)
        self._total, self._gate = torch.zeros((2, 1), dtype=torch.int64, device=device)
        self._request, self._step = torch.zeros((2, tokens), dtype=torch.int64, device=device)
        self._decided, self._points = torch.ones((2, slots), dtype=torch.bool, device=device)
        self._rules = Rules(
            torch.zeros(slots, device=device),
            torch.full((slots,), NO_TOP_K, device=device),
            torch.ones(slots, device=device),
            torch.zeros(slots, device=device),
        )
        self._opened: bool | tuple[int, int] = False  # requests and tokens of anchors alone
        self._taken: Sampling | None = None
        self._zeros = torch.zeros(slots, dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._results: dict[int, torch.Tensor] = {}

    def capture(self, runner: Any, output: Any, batch: Any, tokens: int) -> None:
        """Capture the tail. SGLang calls this after the captured forward of `tokens` tokens."""
        count, request, step = batch.batch_size, self._request[:tokens], self._step[:tokens]
        drafts, seeds, anchors = self._drafts[:count], self._seeds[:count], batch.seq_lens.long()
        lens = self._lens[:count]
        verification = Verification(
            drafts, lens, torch.cat([self._begins[:count], self._total]),
            uniforms=uniforms(streams(seeds, anchors, Purpose.ACCEPT), drafts.shape[1]),
            final_keys=streams(seeds, anchors, Purpose.FINAL),
            decided=self._decided[:count], draft_probs=self._q, vocab=self._vocab, by_block=self._by_block,
            points=None if self._q is None else self._points[:count],
        )  # fmt: skip
        rules = Rules(*(rule[:count] for rule in self._rules if rule is not None))
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
        if alone and self._opened == (count, tokens) and self._taken is sampling:
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
        self._take_rules(sampling, count)
        self._opened = (count, tokens) if alone else True

    def _take_rules(self, sampling: Sampling, count: int) -> None:
        """Copy rules and seeds into the graph's buffers, once for the same running requests."""
        if self._taken is sampling:
            return
        self._taken = sampling
        self._rules.temperatures[count:].zero_()
        self._decided[:count].copy_(sampling.decided)
        self._seeds[:count].copy_(sampling.seeds)
        for mine, its, off in zip(self._rules, sampling.rules, (0.0, NO_TOP_K, 1.0, 0.0), strict=True):
            assert mine is not None
            if its is None:
                mine[:count].fill_(off)
            else:
                mine[:count].copy_(its)

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
