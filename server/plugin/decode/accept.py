"""Stage 5, accept: drafts that the target would write are kept, and it draws the token after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from .flatten import StepBatch
from .logit_rules import LogitRules
from .requests import RequestTable
from .sampling import Sampling
from .verify_tail import VerifyTail

Barrier = Callable[[], None] | None


@dataclass(frozen=True, slots=True, eq=False)
class Accepted:
    """Tokens of a step.

    tokens: [R, gamma + 1]; the first lens [R] are committed. seq_lens, anchors: [R], cached tokens and anchors of the
    next step. by_graph: the graph of the verification has accepted and committed them.
    """

    lens: torch.Tensor
    tokens: torch.Tensor
    seq_lens: torch.Tensor
    anchors: torch.Tensor
    by_graph: bool = False

    @classmethod
    def of(cls, lens: torch.Tensor, tokens: torch.Tensor, batch: StepBatch) -> Self:
        return cls(lens, tokens, batch.seq_lens + lens, tokens.gather(1, lens[:, None] - 1)[:, 0])


class AcceptStage:
    """runner: SGLang's model runner of the target. tail: accepts in the graph of the verification; None: no graphs."""

    def __init__(self, runner: Any, rules: LogitRules, requests: RequestTable, tail: VerifyTail | None) -> None:
        self.runner, self.rules, self.requests, self.tail = runner, rules, requests, tail

    def first_tokens(self, scheduled: Any, logits: torch.Tensor, at: np.ndarray) -> torch.Tensor:
        """Draw the first tokens [R] of answers from logits [R, V] after a prefill; at: [R], rows of the requests."""
        seq_lens, rows = scheduled.seq_lens, scheduled.req_pool_indices.long()
        self.rules.prefilled(scheduled, logits, seq_lens)
        given = self.requests.seeds[rows], self.requests.seeded[rows], self.requests.kinds(at)
        return Sampling.of(scheduled.sampling_info, *given).draw(logits, seq_lens - 1)

    def prepare(self, batch: StepBatch) -> bool:
        """Prepare the graph of the verification to accept and commit the step; return whether it can."""
        return self.tail is not None and self.tail.takes(batch)

    def __call__(
        self, batch: StepBatch, verified: Any, contexts: np.ndarray, *, in_graph: bool, barrier: Barrier
    ) -> Accepted:
        """Accept by the logits of `verified`, the verification's result. in_graph: its graph was prepared to.
        contexts: the host's upper bounds of seq_lens. barrier: SGLang's, waits for grammars."""
        flat, sampling, output = batch.flat, batch.sampling, verified.logits_output
        if in_graph and verified.can_run_cuda_graph:
            assert self.tail is not None
            output.hidden_states = None
            return Accepted(*self.tail.results(len(batch.rows), len(flat.request)), by_graph=True)
        self.runner.shared_read_done_event = None  # rules read the page table after its graph
        given = batch.scheduled, output, flat, batch.anchors, batch.draft.tokens, batch.seq_lens
        longest = int(contexts.max())
        logits = self.rules.verified(*given, longest=longest, exact=not sampling.all_greedy, barrier=barrier)
        return Accepted.of(*sampling.accept(logits, batch.draft, batch.verify_lens, flat), batch)
