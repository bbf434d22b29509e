"""The speculative worker: draft, plan, flatten, verify, accept, commit, once per decode step.

SGLang's scheduler calls it for every batch. A prefill runs the target, shows its tokens to the drafter and draws the
first token. All randomness comes from `outrider.kernels.noise`, all sampling from `Sampling`. Optional parts follow
requests and steps by the interface in `optional/part.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.scheduler import GenerationBatchResult

from .base import Publish
from .flatten import StepBatch
from .leader import LeaderWorker
from .requests import rows_and_lengths


class SpeculativeWorker(LeaderWorker):
    def _prefill(self, scheduled: Any, on_publish: Publish) -> GenerationBatchResult:
        at = self.admit(scheduled)
        result = self.verify.prefill(scheduled)
        self.commit.prompts(self.drafter, scheduled, result.logits_output, at)
        if self.verify.captures_hidden:
            result.logits_output.hidden_states = None
        if scheduled.is_prefill_only:
            tokens = torch.zeros(len(at), dtype=torch.int64, device=self.device)
        else:
            tokens = self.accept.first_tokens(scheduled, result.logits_output.next_token_logits, at)
            self.ranks.broadcast(tokens)
        result = self._prefilled(scheduled, result, tokens, on_publish)
        self.parts.sent(result, self.requests, at, None, None)
        return result

    def _decode(self, scheduled: Any, on_publish: Publish, barrier: Callable[[], None] | None) -> GenerationBatchResult:
        """Do one decode step. If drafting or planning fails, it verifies no drafts."""
        run, batch = self.optional.run, StepBatch.of(scheduled, self.page_table)
        at, contexts, unsure = rows_and_lengths(scheduled, self.width)
        batch.sampling, classes = self.sampling.of(scheduled, batch.rows)
        self.parts.begins()

        step = run("planning", None, self.planning.begin, at, contexts, classes, unsure)
        bucket = self.planning.least_bucket(len(at)) if step is None else step.bucket
        self.ranks.broadcast_bucket(bucket)

        batch.draft, seconds = self.draft(self.drafter, batch, step)

        admission = None if step is None else run("planning", None, self.planning.admit, step, batch.draft, seconds)
        verify_lens = torch.zeros_like(batch.seq_lens) if admission is None else admission.verify_lens
        batch.alone = admission is None or admission.ends is None
        self.ranks.broadcast(batch.draft.tokens, verify_lens)

        batch.flatten(batch.draft.tokens, verify_lens, bucket)

        in_graph = self.accept.prepare(batch)
        verified = self.verify(batch)

        accepted = self.accept(batch, verified, contexts, in_graph=in_graph, barrier=barrier)
        self.ranks.broadcast(accepted.tokens, accepted.lens)

        if not accepted.by_graph:
            self.commit(self.drafter, batch, accepted, verified.logits_output, at)

        result = self._decoded(batch, verified, accepted, on_publish)
        if admission is not None:
            outcome = run("planning", None, self.planning.finish, admission, accepted.lens)
            verified.logits_output.auxiliary_device_output = outcome
        self.parts.sent(result, self.requests, at, admission, accepted.lens)
        return result
