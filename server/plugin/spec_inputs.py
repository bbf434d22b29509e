"""Inputs of SGLang's steps: the state between them, the shape of a verification."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType


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


def verify_input(
    positions: torch.Tensor, layout: RaggedVerifyLayout, width: int, captures_hidden: bool
) -> DFlashVerifyInput:
    """Return the shape of a ragged verification. positions: [B] int64. layout: the requests' lengths. width: gamma + 1,
    most tokens of a request."""
    mode = CaptureHiddenMode.FULL if captures_hidden else CaptureHiddenMode.NULL
    return DFlashVerifyInput(None, positions, width, capture_hidden_mode=mode, ragged_verify_layout=layout)


def ragged_layout(qo_indptr: torch.Tensor, tokens: int) -> RaggedVerifyLayout:
    """Return SGLang's description of a batch of `tokens`; the begins and ends of requests [R+1] stay on the device."""
    ends = qo_indptr.to(torch.int32)
    return RaggedVerifyLayout(
        verify_lens=ends[1:] - ends[:-1], graph_num_tokens=tokens, extend_start_loc=ends[:-1], qo_indptr_device=ends
    )


def indptr(lens: torch.Tensor) -> torch.Tensor:
    """Return [R+1] int32, the start of each of R consecutive runs of `lens`, and the end of the last."""
    return torch.cat([lens.new_zeros(1), lens.cumsum(0)]).to(torch.int32)
