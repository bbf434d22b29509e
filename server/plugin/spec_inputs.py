"""SGLang's SpecInput types: the state between decode steps, and the shape of a verification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from outrider.kernels.ragged import flatten_bucket, flatten_verify


class StepState(SpecInput):
    """Carried between the steps of a running batch: each request's anchor.

    bonus_tokens: [R] int64, the token committed last (x_0 of the next step), not yet in the cache.
    new_seq_lens: [R] int64, tokens in the cache after the step.
    future_indices: [R], set by SGLang where the relay goes through its future map (overlap scheduling).
    """

    def __init__(self, bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor):
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.bonus_tokens = bonus_tokens
        self.new_seq_lens = new_seq_lens
        self.future_indices: torch.Tensor | None = None
        self.num_tokens_per_req = self.num_tokens_for_logprob_per_req = 1
        # Fields of other algorithms that SGLang's relay copies.
        self.topk_p = self.topk_index = self.hidden_states = self.draft_probs = None

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, other: StepState) -> None:
        if self.future_indices is not None:
            assert other.future_indices is not None
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        self.new_seq_lens = torch.cat([self.new_seq_lens, other.new_seq_lens])


class VerifyInput(SpecInput):
    """Tells the target's forward the shape of a ragged verify.

    positions: [B] int64. query_lens: [R], 1 + verify_len of each request. draft_token_num: gamma + 1.
    layout: the lengths for SGLang's own CUDA backends, which otherwise expect draft_token_num rows of every request.
        None: for our backend, which reads query_lens.
    """

    topk = 1  # a chain, no tree

    def __init__(
        self,
        positions: torch.Tensor,
        query_lens: torch.Tensor,
        draft_token_num: int,
        capture_hidden: bool,
        layout: RaggedVerifyLayout | None = None,
    ):
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.positions = positions
        self.query_lens = query_lens
        self.ragged_verify_layout = layout
        self.draft_token_num = self.num_tokens_per_req = self.num_tokens_for_logprob_per_req = draft_token_num
        self.capture_hidden_mode = CaptureHiddenMode.FULL if capture_hidden else CaptureHiddenMode.NULL


@dataclass(frozen=True, slots=True)
class FlatVerify:
    """One verify batch, flattened: B = sum(1 + verify_lens) tokens, or a larger bucket that ends in padding.

    input_ids, positions, slots: [B] int64. qo_indptr: [R+1] int64. request: [B] int64, the request of each token.
    step: [B] int64, k: 0 is the anchor, 1..verify_len the drafted tokens. For padding see `flatten_bucket`.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    qo_indptr: torch.Tensor
    request: torch.Tensor
    step: torch.Tensor


def flatten(
    anchors: torch.Tensor,
    draft_tokens: torch.Tensor,
    verify_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    bucket: int | None = None,
) -> FlatVerify:
    """Lay out anchors [R] and the first verify_lens [R] of draft_tokens [R, gamma] as one batch, of `bucket` tokens.
    Without a bucket it has no padding, and the host waits for the device, which knows the lengths."""
    batch = anchors, draft_tokens, verify_lens, seq_lens, page_table, rows
    return FlatVerify(*(flatten_verify(*batch) if bucket is None else flatten_bucket(*batch, bucket)))


def ragged_layout(flat: FlatVerify) -> RaggedVerifyLayout:
    """Return SGLang's description of a flattened batch; the lengths stay on the device."""
    ends = flat.qo_indptr.to(torch.int32)
    return RaggedVerifyLayout(
        verify_lens=ends[1:] - ends[:-1],
        graph_num_tokens=len(flat.input_ids),
        extend_start_loc=ends[:-1],
        qo_indptr_device=ends,
    )


class Layouts:
    """Lengths [R] of a flattened batch's requests, anchors included, and SGLang's description of it; a CPU has none.
    Batches of anchors alone have the same while they are of one size."""

    def __init__(self) -> None:
        self._size: tuple[int, int] | None = None

    def of(
        self, flat: FlatVerify, verify_lens: torch.Tensor, *, alone: bool = False
    ) -> tuple[torch.Tensor, RaggedVerifyLayout | None]:
        """alone: verify_lens [R] are 0, known on the host."""
        size = len(verify_lens), len(flat.input_ids)
        if not alone or self._size != size:
            layout = None if verify_lens.is_cpu else ragged_layout(flat)
            self._last = verify_lens + 1 if layout is None else layout.verify_lens, layout
            self._size = size if alone else None
        return self._last


def uniform_verify(positions: torch.Tensor, requests: int) -> VerifyInput:
    """Return a verification of T / R tokens of each request, at positions [T]."""
    width = len(positions) // requests
    lens = torch.full((requests,), width, dtype=torch.int64, device=positions.device)
    ends = torch.arange(0, len(positions) + 1, width, dtype=torch.int32, device=positions.device)
    layout = RaggedVerifyLayout(
        verify_lens=lens.to(torch.int32),
        graph_num_tokens=len(positions),
        extend_start_loc=ends[:-1],
        qo_indptr_device=ends,
    )
    return VerifyInput(positions, lens, width, capture_hidden=False, layout=layout)


def indptr(lens: torch.Tensor) -> torch.Tensor:
    """Return [R+1] int32, the start of each of R consecutive runs of `lens`, and the end of the last."""
    return torch.cat([lens.new_zeros(1), lens.cumsum(0)]).to(torch.int32)


def extend_positions(prefix_lens: list[int], extend_lens: list[int], device: Any) -> torch.Tensor:
    """Return [N] int64 positions of the tokens of a prefill batch."""
    starts = torch.tensor(prefix_lens, dtype=torch.int64)
    lens = torch.tensor(extend_lens, dtype=torch.int64)
    ends = lens.cumsum(0)
    offsets = torch.arange(int(ends[-1])) - (ends - lens).repeat_interleave(lens)
    return (starts.repeat_interleave(lens) + offsets).to(device)
