"""Source of each token of an answer, for requests that ask: sent along with the tokens.

A step's result carries them (SGLang's `managers/auxiliary_output.py`). Sources of committed tokens go to the request's
`customized_info`, which arrives with the tokens, in their `meta_info`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.auxiliary_output import append_auxiliary_output

from outrider.scheduler.calibration.classes import SOURCES

from ...options import RequestOptions
from ..boundary import Boundary
from ..step import Admission
from .part import OptionalPart

KEY = "outrider_trace"
"""Key in `meta_info`: each token's index in MAKERS, and its confidence (NaN for the target's own)."""
MAKERS = ("target", *SOURCES)
TARGET, MODEL, LOOKUP, ACROSS, GRAMMAR = range(len(MAKERS))


@dataclass(frozen=True, slots=True, eq=False)
class StepTrace:
    """Sources of the tokens that a step brought its R requests.

    traced: [R] bool, requests with a trace, on the host. makers: [R, n] int64, each token's place in MAKERS; the
    first accept_lens of a row are read. confidence: [R, n] float32, calibrated; NaN for the target's own tokens.
    optional: where SGLang's calls may fail.
    """

    traced: np.ndarray
    makers: torch.Tensor
    confidence: torch.Tensor
    optional: Boundary = field(default_factory=Boundary)

    @classmethod
    def of_first_tokens(cls, traced: np.ndarray, device: Any) -> StepTrace:
        """Return the trace of a prefill: all tokens come from the target."""
        unsure = torch.full((len(traced), 1), torch.nan, device=device)
        return cls(traced, torch.full_like(unsure, TARGET, dtype=torch.int64), unsure)

    @classmethod
    def of_step(cls, traced: np.ndarray, admission: Admission, accept_lens: torch.Tensor) -> StepTrace:
        """Return the trace of a decode step. accept_lens: [R], accepted drafts plus the target's token."""
        confidence = torch.nn.functional.pad(admission.confidence.float(), (0, 1), value=torch.nan)
        columns = torch.arange(confidence.shape[1], device=confidence.device)
        drafted = columns < accept_lens[:, None] - 1
        makers = torch.where(drafted, MODEL + admission.classes[:, None] % len(SOURCES), TARGET)
        return cls(traced, makers, confidence.masked_fill(~drafted, torch.nan))

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> StepTrace:
        """Copy to the host; SGLang's scheduler calls it before `consume`."""
        return self.optional.run("tracing", self, self._copied, copy_tensor)

    def _copied(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> StepTrace:
        return replace(self, makers=copy_tensor(self.makers), confidence=copy_tensor(self.confidence))

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Attach sources to the requests; SGLang's scheduler calls it. commits: the tokens of each; None: none."""
        self.optional.run("tracing", None, self._tell, batch, commits)

    def _tell(self, batch: Any, commits: Sequence[Any]) -> None:
        for index in self.traced.nonzero()[0].tolist():
            if commits[index] is None:
                continue
            request, count = batch.reqs[index], len(commits[index].token_ids)
            if request.customized_info is None:
                request.customized_info = {KEY: []}
            request.customized_info[KEY] += zip(
                self.makers[index, :count].tolist(), self.confidence[index, :count].tolist(), strict=True
            )


class Tracing(OptionalPart):
    """Sends the traces of requests that ask. optional: where SGLang's calls may fail."""

    part, column = "tracing", "traced"

    def __init__(self, optional: Boundary) -> None:
        self.optional = optional

    def admitted(self, req: Any) -> int:
        return int(RequestOptions.from_custom_params(req.sampling_params.custom_params).trace)

    def sent(self, result: Any, numbers: np.ndarray, admission: Admission | None, accept_lens: Any) -> None:
        """Attach a trace; SGLang copies one on a device with the rest of the result."""
        if not np.count_nonzero(numbers):
            return
        if admission is None:
            trace = StepTrace.of_first_tokens(numbers, result.next_token_ids.device)
        else:
            trace = StepTrace.of_step(numbers, admission, accept_lens)
        trace = replace(trace, optional=self.optional)
        if trace.makers.is_cpu:
            result.auxiliary_host_output = trace
        else:
            output = result.logits_output
            output.auxiliary_device_output = append_auxiliary_output(output.auxiliary_device_output, trace)
