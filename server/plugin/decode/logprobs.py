"""Logprobs of committed tokens, for requests that ask, stored where SGLang's result processing reads them."""

from typing import Any

import numpy as np
import torch
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor

from outrider.kernels.ragged import FlatVerify
from outrider.kernels.upload import upload


def write_logprobs(logits_output: Any, batch: Any, logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """Write logprobs of tokens [R], the first of R requests, drawn from logits [R, V] (rules applied, temperature not),
    before top-k, top-p and min-p, as in plain decoding."""
    asking = _asking(batch)
    index = upload(asking, tokens.device)
    _write(logits_output, batch, asking, index, logits[index], tokens[:, None])
    logits_output.next_token_logprobs = logits_output.next_token_logprobs[:, 0]


def write_step_logprobs(logits_output: Any, batch: Any, flat: FlatVerify, tokens: torch.Tensor) -> None:
    """Do `write_logprobs` for a decode step's tokens [R, gamma+1]. Columns after a request's last row repeat it and are
    not read."""
    asking = _asking(batch)
    index = upload(asking, tokens.device)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    begins, ends = flat.qo_indptr[index], flat.qo_indptr[index + 1]
    rows = torch.minimum(begins[:, None] + columns, ends[:, None] - 1).flatten()
    _write(logits_output, batch, asking, index, logits_output.next_token_logits[rows], tokens)


def _asking(batch: Any) -> np.ndarray:
    """Return the places of the requests that ask for logprobs."""
    return np.array([place for place, req in enumerate(batch.reqs) if req.return_logprob], dtype=np.int64)


def _write(
    logits_output: Any, batch: Any, asking: np.ndarray, index: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Write logprobs of tokens [R, W], 0 for requests that do not ask.

    asking, index: [A], places of requests that ask, on the host and the device. logits: [A * W, V], of these requests.
    """
    width = tokens.shape[1]
    owners, heat = asking.repeat(width), batch.sampling_info.temperatures[index].repeat_interleave(width, 0)
    output = OutputLogprobProcessor().compute_logprobs(
        torch.log_softmax(logits.float().div_(heat), -1),
        [batch.top_logprobs_nums[r] for r in owners],
        [batch.token_ids_logprobs[r] for r in owners],
        tokens[index].flatten(),
    )
    whole = torch.zeros(tokens.shape, device=tokens.device)
    whole[index] = output.token_logprobs.view(-1, width)
    output.token_logprobs = whole
    # SGLang finds a request's lists by its place among all.
    places = (asking[:, None] * width + np.arange(width)).flatten().tolist()
    for name in ("top_logprobs_val", "top_logprobs_idx", "token_ids_logprobs_val", "token_ids_logprobs_idx"):
        if (of_asking := getattr(output, name)) is not None:
            nothing: Any = whole.new_empty(0) if isinstance(of_asking[0], torch.Tensor) else []
            lists: list[Any] = [nothing] * tokens.numel()
            for place, each in zip(places, of_asking, strict=True):
                lists[place] = each
            setattr(output, name, lists)
    output.write_output_to(logits_output)
