"""The results of a prefill and of a decode step, for SGLang's scheduler."""

import torch
from sglang.srt.managers.scheduler import GenerationBatchResult

from ..spec_inputs import StepState


class HostResult(GenerationBatchResult):
    """A result already on the CPU; skips SGLang's check of its device."""

    def copy_to_cpu(self, return_logprob: bool, return_hidden_states: bool = True) -> None:
        self.copy_done.record()


def prefilled(
    result: GenerationBatchResult, tokens: torch.Tensor, seq_lens: torch.Tensor, width: int
) -> GenerationBatchResult:
    """Return a prefill's result: the first tokens [R] of requests with seq_lens [R] cached. width: gamma + 1."""
    result.next_token_ids = tokens
    result.new_seq_lens = seq_lens
    result.next_draft_input = StepState(tokens, seq_lens)
    result.speculative_num_draft_tokens = width
    return result


def decoded(
    verified: GenerationBatchResult,
    query_lens: torch.Tensor,
    tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    new_seq_lens: torch.Tensor,
    bonus: torch.Tensor,
) -> GenerationBatchResult:
    """Return a decode step's result. tokens: [R, gamma + 1], the first accept_lens [R] are committed. bonus: [R], the
    last committed tokens, the next anchors. query_lens: [R], rows of each request's verification."""
    result_type = HostResult if tokens.is_cpu else GenerationBatchResult
    result = result_type(
        logits_output=verified.logits_output,
        next_token_ids=tokens.flatten(),
        accept_lens=accept_lens,
        new_seq_lens=new_seq_lens,
        can_run_cuda_graph=verified.can_run_cuda_graph,
        next_draft_input=StepState(bonus, new_seq_lens),
        speculative_num_draft_tokens=tokens.shape[1],
    )
    result.cap_lens = query_lens
    return result
