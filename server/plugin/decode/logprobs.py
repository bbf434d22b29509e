"""Logprobs of committed tokens, where SGLang's result processing looks for them."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor


def write_logprobs(
    logits_output: Any, batch: Any, logits: torch.Tensor, request: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Of tokens [M] drawn from logits [M, V] (rules applied, temperature not) by the requests [M].

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
