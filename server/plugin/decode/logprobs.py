"""Logprobs of committed tokens, where SGLang's result processing looks for them."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor

from ..spec_inputs import FlatVerify


def write_logprobs(
    logits_output: Any, batch: Any, logits: torch.Tensor, request: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Write logprobs of tokens [M] drawn from logits [M, V] (rules applied, temperature not) by requests [M].

    They are of the distribution the token was drawn from, before top-k, top-p and min-p, as in plain decoding.
    """
    owners = request.tolist()
    logprobs = torch.log_softmax(logits / batch.sampling_info.temperatures[request], -1)
    OutputLogprobProcessor().compute_logprobs(
        logprobs,
        [batch.top_logprobs_nums[r] for r in owners],
        [batch.token_ids_logprobs[r] for r in owners],
        tokens,
    ).write_output_to(logits_output)


def write_step_logprobs(logits_output: Any, batch: Any, flat: FlatVerify, tokens: torch.Tensor) -> None:
    """`write_logprobs` of a decode step's tokens [R, gamma+1], as wide as these; columns beyond a request's rows repeat
    its last and are not read."""
    width = tokens.shape[1]
    columns = torch.arange(width, device=tokens.device)
    rows = torch.minimum(flat.qo_indptr[:-1, None] + columns, flat.qo_indptr[1:, None] - 1).flatten()
    logits = logits_output.next_token_logits[rows]
    write_logprobs(logits_output, batch, logits, flat.request[rows], tokens.flatten())
    logits_output.next_token_logprobs = logits_output.next_token_logprobs.view(-1, width)
