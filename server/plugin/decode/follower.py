"""The worker of every tensor-parallel rank but the first: it computes and makes no decisions."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from ..attention_backends import buckets_of
from ..loading.drafter import whole_weights
from ..spec_inputs import flatten
from .boundary import Boundary
from .logprobs import write_logprobs, write_step_logprobs
from .results import decoded, prefilled
from .worker import SpeculativeWorker


class FollowerWorker(SpeculativeWorker):
    """Runs the first rank's tokens through its part of the target, and passes the tokens that the first rank has drawn
    to its own scheduler. It has no drafter, planner, seeds or metrics. SGLang requires logprobs on every rank, but
    sends only the first rank's.
    """

    def _set_up(self, runner: Any, slots: int) -> None:
        self.drafter = self.by_owner = self.texts = None
        self.optional = Boundary()
        self.has_buckets = buckets_of(runner, self.width) is not None
        whole_weights(self.config, runner)  # gives its rows to the first rank

    def _prefill(self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None) -> GenerationBatchResult:
        result = self.target_worker.forward_batch_generation(batch, is_verify=True, capture_hidden_mode=None)
        count = len(batch.reqs)
        if batch.is_prefill_only:
            tokens = torch.zeros(count, dtype=torch.int64, device=self.device)
        else:
            (tokens,) = self.ranks.receive((count,))
            if batch.return_logprob:
                write_logprobs(result.logits_output, batch, result.logits_output.next_token_logits, tokens)
        if on_publish is not None:
            on_publish(batch.seq_lens)
        return prefilled(result, tokens, batch.seq_lens, self.width)

    def _decode(
        self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None, grammar_barrier: Callable[[], None] | None
    ) -> GenerationBatchResult:
        rows, seq_lens = batch.req_pool_indices.long(), batch.seq_lens.long()
        anchors, count = batch.spec_info.bonus_tokens.long(), len(rows)
        bucket = self.ranks.receive_bucket() if self.has_buckets else None
        draft_tokens, verify_lens = self.ranks.receive((count, self.width - 1), (count,))
        flat = flatten(anchors, draft_tokens, verify_lens, seq_lens, self.req_to_token_pool.req_to_token, rows, bucket)
        query_lens, verified = self._verify(batch, flat, verify_lens, seq_lens, rows)
        tokens, accept_lens = self.ranks.receive((count, self.width), (count,))
        new_seq_lens, bonus = seq_lens + accept_lens, tokens.gather(1, accept_lens[:, None] - 1)[:, 0]
        if on_publish is not None:
            on_publish(new_seq_lens)
        if batch.return_logprob:
            write_step_logprobs(verified.logits_output, batch, flat, tokens)
        batch.forward_mode = ForwardMode.DECODE
        return decoded(verified, query_lens, tokens, accept_lens, new_seq_lens, bonus)

    def outrider_state(self) -> dict[str, Any]:
        return {}

    def outrider_live(self) -> dict[str, Any]:
        return {}

    def forget_records(self) -> None:
        pass

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        pass

    def reload_profile(self) -> None:
        pass

    def use_drafter(self, folder: str) -> None:
        pass
