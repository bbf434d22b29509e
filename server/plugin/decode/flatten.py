"""Stage 3, flatten: anchors and verified drafts of all requests, one after the other in one batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch

from outrider.drafters.base import Draft
from outrider.kernels.ragged import FlatVerify, flatten_verify

if TYPE_CHECKING:
    from .sampling import Sampling


def flatten(
    anchors: torch.Tensor, draft_tokens: torch.Tensor, verify_lens: torch.Tensor, seq_lens: torch.Tensor,
    page_table: torch.Tensor, rows: torch.Tensor, bucket: int | None = None,
) -> FlatVerify:  # fmt: skip
    """Lay out anchors [R] and the first verify_lens [R] of draft_tokens [R, gamma] as one batch, of `bucket` tokens.
    Without a bucket it has no padding, and the host waits for the device, which knows the lengths."""
    batch = anchors, draft_tokens, verify_lens, seq_lens, page_table, rows
    return flatten_verify(*batch, bucket)


@dataclass(slots=True, eq=False)
class StepBatch:
    """R requests of a decode step; each stage adds its result.

    scheduled: SGLang's batch. rows: [R] int64, of the request pool. seq_lens: [R] int64, cached tokens.
    anchors: [R] int64, the tokens committed last. page_table: [requests, context] int, the slots of each row's tokens.
    sampling: on the first rank. verify_lens: [R] int64, verified drafts. alone: the host knows that they are 0.
    """

    scheduled: Any
    rows: torch.Tensor
    seq_lens: torch.Tensor
    anchors: torch.Tensor
    page_table: torch.Tensor
    sampling: Sampling = field(init=False)
    draft: Draft = field(init=False)
    verify_lens: torch.Tensor = field(init=False)
    flat: FlatVerify = field(init=False)
    alone: bool = False

    @classmethod
    def of(cls, scheduled: Any, page_table: torch.Tensor) -> Self:
        anchors = scheduled.spec_info.bonus_tokens.long()
        return cls(scheduled, scheduled.req_pool_indices.long(), scheduled.seq_lens.long(), anchors, page_table)

    def flatten(self, draft_tokens: torch.Tensor, verify_lens: torch.Tensor, bucket: int | None) -> None:
        """Lay out the first verify_lens [R] of draft_tokens [R, gamma]; see `flatten`."""
        self.verify_lens = verify_lens
        layout = self.seq_lens, self.page_table, self.rows, bucket
        self.flat = flatten(self.anchors, draft_tokens, verify_lens, *layout)
