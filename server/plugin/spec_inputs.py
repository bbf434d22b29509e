"""SGLang's SpecInput types: the state between steps, the shape of a verification."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
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


def ragged_layout(qo_indptr: torch.Tensor, tokens: int) -> RaggedVerifyLayout:
    """Return SGLang's description of a batch of `tokens`; the begins and ends of requests [R+1] stay on the device."""
    ends = qo_indptr.to(torch.int32)
    return RaggedVerifyLayout(
        verify_lens=ends[1:] - ends[:-1], graph_num_tokens=tokens, extend_start_loc=ends[:-1], qo_indptr_device=ends
    )


def indptr(lens: torch.Tensor) -> torch.Tensor:
    """Return [R+1] int32, the start of each of R consecutive runs of `lens`, and the end of the last."""
    return torch.cat([lens.new_zeros(1), lens.cumsum(0)]).to(torch.int32)
