"""Stage 6, commit: committed tokens become state at their KV slots: the history, the drafter's, the target's own."""

from typing import Any

import numpy as np
import torch

from outrider.drafters.base import Drafter, Features
from outrider.kernels.ragged import commit

from ..attention_backends import commit_states
from ..image_tokens import within_vocabulary
from .accept import Accepted
from .boundary import Boundary
from .flatten import StepBatch
from .logit_rules import LogitRules
from .requests import RequestTable, prefilled_chunks


class CommitStage:
    """runner: SGLang's model runner of the target. rules: with history and page table. owned: requests have their own
    sets of the drafter's weights."""

    def __init__(
        self, runner: Any, rules: LogitRules, requests: RequestTable, optional: Boundary, *, owned: bool
    ) -> None:
        self.runner, self.rules, self.requests, self.optional, self.owned = runner, rules, requests, optional, owned

    def prompts(self, drafter: Drafter | None, scheduled: Any, output: Any, at: np.ndarray) -> None:
        """Commit chunks of prompts. output: of their forward. at: [R], rows of the requests."""
        tokens = within_vocabulary(scheduled.input_ids, scheduled.reqs, self.runner.model_config)
        cached, lens = torch.tensor(scheduled.prefix_lens), torch.tensor(scheduled.extend_lens)
        shifts = (cached - lens.cumsum(0) + lens).repeat_interleave(lens)  # from places in the batch to positions
        positions = (torch.arange(len(shifts)) + shifts).to(tokens.device)
        sets = torch.from_numpy(self.requests.numbers["sets"][at].repeat(scheduled.extend_lens)) if self.owned else None
        self.observe(drafter, output.hidden_states, tokens, positions, scheduled.out_cache_loc, sets)
        if drafter is not None:
            chunks = prefilled_chunks(scheduled, self.rules.page_table)
            self.optional.run("drafting", None, drafter.prefilled, chunks)

    def __call__(
        self, drafter: Drafter | None, batch: StepBatch, accepted: Accepted, output: Any, at: np.ndarray
    ) -> None:
        """Commit anchors and accepted drafts. output: of the verification. at: [R], rows of the requests."""
        commit_states(self.runner, accepted.lens)
        flat = batch.flat
        hidden, tokens, positions, slots = output.hidden_states, flat.input_ids, flat.positions, flat.slots
        sets = torch.from_numpy(self.requests.numbers["sets"][at])[flat.request] if self.owned else None
        if not slots.is_cpu:  # the host does not know the count: rejected tokens go to slot 0
            slots = commit(accepted.lens, accepted.tokens, batch.seq_lens, flat.request, flat.step, slots)[2]
        elif len(tokens) > len(accepted.lens):  # more than anchors, which always stay
            kept = (flat.step < accepted.lens[flat.request]).nonzero()[:, 0]
            hidden = None if hidden is None else hidden[kept]
            tokens, positions, slots = tokens[kept], positions[kept], slots[kept]
            sets = None if sets is None else sets[kept]
        self.observe(drafter, hidden, tokens, positions, slots, sets)
        output.hidden_states = None

    def observe(
        self, drafter: Drafter | None, hidden: torch.Tensor | None, tokens: torch.Tensor, positions: torch.Tensor,
        slots: torch.Tensor, sets: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.rules.history.write(slots, tokens)
        if drafter is not None:
            features = Features(hidden, tokens, positions, slots, sets)
            self.optional.run("drafting", None, drafter.observe, features)
