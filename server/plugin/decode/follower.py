"""The worker of every tensor-parallel rank but the first: it computes and makes no decisions."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.scheduler import GenerationBatchResult

from ..attention_backends import buckets_of
from ..loading.drafter import whole_weights
from .accept import Accepted
from .base import Publish, TargetWorker
from .boundary import Boundary
from .flatten import StepBatch


class FollowerWorker(TargetWorker):
    """Runs the first rank's tokens through its part of the target, and passes the tokens that the first rank has drawn
    to its own scheduler. It has no drafter, planner, seeds or metrics. SGLang requires logprobs on every rank, but
    sends only the first rank's.
    """

    def _set_up(self, runner: Any, slots: int) -> None:
        self.optional = Boundary()
        self.has_buckets = buckets_of(runner, self.width) is not None
        whole_weights(self.config, runner)  # gives its rows to the first rank

    def _prefill(self, scheduled: Any, on_publish: Publish) -> GenerationBatchResult:
        result, count = self.verify.prefill(scheduled), len(scheduled.reqs)
        if scheduled.is_prefill_only:
            tokens = torch.zeros(count, dtype=torch.int64, device=self.device)
        else:
            (tokens,) = self.ranks.receive((count,))
        return self._prefilled(scheduled, result, tokens, on_publish)

    def _decode(self, scheduled: Any, on_publish: Publish, barrier: Callable[[], None] | None) -> GenerationBatchResult:
        batch = StepBatch.of(scheduled, self.page_table)
        count = len(batch.rows)
        bucket = self.ranks.receive_bucket() if self.has_buckets else None
        draft_tokens, verify_lens = self.ranks.receive((count, self.width - 1), (count,))
        batch.flatten(draft_tokens, verify_lens, bucket)
        verified = self.verify(batch)
        tokens, accept_lens = self.ranks.receive((count, self.width), (count,))
        return self._decoded(batch, verified, Accepted.of(accept_lens, tokens, batch), on_publish)

    def outrider_state(self) -> dict[str, Any]:
        return {}

    def _ignore(self, *_: Any) -> None:
        """The first rank does it."""

    outrider_live = outrider_state
    forget_records = reload_profile = save = use_drafter = drop_owner = _ignore
