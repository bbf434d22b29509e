"""Accepting and committing at the end of the target's verification graph, for batches that are greedy throughout.

What is captured runs at every replay. For other batches it goes to the slot of nobody, and the worker accepts itself:
their distributions of drafts would take gamma times the vocabulary of every request and graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from outrider.kernels.acceptance import accept_wanted
from outrider.kernels.ragged import commit
from outrider.kernels.sampling import argmax
from outrider.scheduler.planners.token_buckets import TokenBuckets

from .logit_rules import has_rules

if TYPE_CHECKING:  # tests/gpu/kernels run without SGLang
    from outrider.drafters.base import Draft

    from ..spec_inputs import FlatVerify
    from .sampling import Sampling

Observe = Callable[[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes hidden states, tokens, positions and slots [T]."""


class VerifyTail:
    """observe: shows committed tokens to whoever keeps state by slot; slot 0 belongs to no request."""

    def __init__(self, buckets: TokenBuckets, observe: Observe, device: Any):
        tokens = buckets.graphs[-1]
        slots = buckets.slots(tokens)
        self._buckets, self._observe = buckets, observe
        self._drafts = torch.zeros((slots, buckets.width - 1), dtype=torch.int64, device=device)
        self._lens, self._begins = torch.zeros((2, slots), dtype=torch.int64, device=device)
        self._request, self._step = torch.zeros((2, tokens), dtype=torch.int64, device=device)
        self._gate = torch.zeros(1, dtype=torch.int64, device=device)
        self._opened = False
        self._results: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def capture(self, runner: Any, output: Any, batch: Any, tokens: int) -> None:
        """SGLang calls it behind the forward that it captures, of `tokens` tokens."""
        count, request, step = batch.batch_size, self._request[:tokens], self._step[:tokens]
        wanted = argmax(output.next_token_logits)
        accept_lens, accepted = accept_wanted(self._drafts[:count], self._lens[:count], self._begins[:count], wanted)
        slots = batch.out_cache_loc * self._gate
        slots = commit(accept_lens, accepted, batch.seq_lens, request, step, slots)[2]
        self._observe(output.hidden_states, batch.input_ids, batch.positions, slots)
        self._results[tokens] = accept_lens, accepted

    def takes(self, batch: Any, sampling: Sampling, draft: Draft, verify_lens: torch.Tensor, flat: FlatVerify) -> bool:
        """True if the step is accepted and committed here, if its verification runs as a graph. Then it is laid out for
        that; otherwise the next replay leaves nothing behind."""
        ruled = batch.return_logprob or has_rules(batch.reqs, batch.sampling_info)
        graph = self._buckets.has_graph(len(verify_lens), len(flat.request))
        if ruled or not (sampling.all_greedy and graph):
            self.close()
            return False
        self.open(draft.tokens, verify_lens, flat)
        return True

    def open(self, drafts: torch.Tensor, verify_lens: torch.Tensor, flat: FlatVerify) -> None:
        """The next replay accepts and commits this batch: drafts [R, gamma], verify_lens [R]."""
        count, tokens = len(verify_lens), len(flat.request)
        self._drafts[:count].copy_(drafts)
        self._lens[count:].zero_()
        self._lens[:count].copy_(verify_lens)
        self._begins[count:].zero_()  # a slot without a request reads the first row
        self._begins[:count].copy_(flat.qo_indptr[:-1])
        self._request[:tokens].copy_(flat.request)
        self._step[:tokens].copy_(flat.step)
        self._gate.fill_(1)
        self._opened = True

    def close(self) -> None:
        """The next replay leaves nothing behind."""
        if self._opened:
            for left in (self._gate, self._lens, self._begins, self._request):  # which may be beyond a smaller bucket
                left.zero_()
            self._opened = False

    def results(self, requests: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Results of the last replay, of a bucket of `tokens`: accept_lens [R] and tokens [R, gamma+1]."""
        accept_lens, accepted = self._results[tokens]
        return accept_lens[:requests].clone(), accepted[:requests].clone()  # the next replay writes where they lie
