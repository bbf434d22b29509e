"""Source of each token of an answer, for requests that ask: sent along with the tokens.

SGLang lets a step's result carry extra data for its tokens (`managers/auxiliary_output.py`). SGLang reports which
tokens were committed to which request; the trace then writes their sources to the request's `customized_info`, which
travels with the tokens and arrives in their `meta_info`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from outrider.scheduler.calibration.classes import SOURCES

from .boundary import Boundary
from .step import Admission

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
    def send(
        cls,
        result: Any,
        traced: np.ndarray,
        optional: Boundary,
        admission: Admission | None = None,
        accept_lens: torch.Tensor | None = None,
    ) -> None:
        """Send a step's trace with its result if any request asks. Without an admission each request has one token,
        from the target."""
        if not np.count_nonzero(traced):
            return
        if admission is None or accept_lens is None:
            trace = cls.of_first_tokens(traced, result.next_token_ids.device)
        else:
            trace = cls.of_step(traced, admission, accept_lens)
        trace.attach(result, optional)

    @classmethod
    def of_first_tokens(cls, traced: np.ndarray, device: Any) -> StepTrace:
        """Return the trace of a prefill: all tokens come from the target."""
        shape = (len(traced), 1)
        return cls(
            traced,
            torch.full(shape, TARGET, dtype=torch.int64, device=device),
            torch.full(shape, torch.nan, device=device),
        )

    @classmethod
    def of_step(cls, traced: np.ndarray, admission: Admission, accept_lens: torch.Tensor) -> StepTrace:
        """accept_lens: [R], accepted drafts plus the target's token."""
        confidence = torch.nn.functional.pad(admission.confidence.float(), (0, 1), value=torch.nan)
        columns = torch.arange(confidence.shape[1], device=confidence.device)
        drafted = columns < accept_lens[:, None] - 1
        drafter = MODEL + admission.classes % len(SOURCES)
        return cls(traced, torch.where(drafted, drafter[:, None], TARGET), confidence.masked_fill(~drafted, torch.nan))

    def attach(self, result: Any, optional: Boundary) -> None:
        """Send it with a step's result, from the host as it is, from a device when SGLang copies the rest."""
        sent = replace(self, optional=optional)
        if self.makers.is_cpu:
            result.auxiliary_host_output = sent
        else:
            result.logits_output.auxiliary_device_output = sent

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> StepTrace:
        """Called by SGLang's scheduler, before `consume`."""
        return self.optional.run("tracing", self, self._copied, copy_tensor)

    def _copied(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> StepTrace:
        return replace(self, makers=copy_tensor(self.makers), confidence=copy_tensor(self.confidence))

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Called by SGLang's scheduler; commits: of each request the tokens that it was given, None: none."""
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
