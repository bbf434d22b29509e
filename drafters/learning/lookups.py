"""Prompt lookup along known answers. A server's model drafts only where lookup is unsure (`LookupFirst`).

So the learner trains the drafter there, and judges it with lookup. It leaves out lookup in other requests' texts, which
finds less in the answers of tomorrow.
"""

import torch

from .. import registry
from ..base import DraftBatch
from ..lookup_first import LOOKUP_THRESHOLD
from ..ngram import NgramDrafter
from ..training.batches import anchor_range
from ..training.store import Sequence


class Lookups:
    """Looks up as servers do at temperature 0. kind: name of their drafter. gamma: tokens of a lookup, 0: none."""

    def __init__(self, kind: str, gamma: int) -> None:
        self.gamma, self._run_length = gamma, registry.find(kind).expected_run_length
        self._ngram = NgramDrafter(gamma)

    def along(self, s: Sequence, model_gamma: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, for each of the N anchors of an answer, how many tokens a lookup expects to be accepted [N] float32,
        cut to the model's gamma, and how many the answer accepts [N] int64."""
        anchors = torch.arange(*anchor_range(s))
        if not self.gamma:
            return torch.zeros(len(anchors)), torch.zeros_like(anchors)
        rows, every = torch.zeros_like(anchors), torch.arange(len(s.tokens))
        self._ngram.allocate(len(s.tokens))
        self._ngram.history.write(every, s.tokens)
        draft = self._ngram.propose(
            DraftBatch(
                anchors=s.tokens[anchors], seq_lens=anchors, page_table=every[None].int(),
                rows=rows, temperatures=rows.float(), keys=rows[:, None], all_greedy=True, wants_probs=False,
            )
        )  # fmt: skip
        reach = anchors[:, None] + torch.arange(1, 1 + self.gamma)
        right = (reach < len(s.tokens)) & (s.tokens[reach.clamp_max(len(s.tokens) - 1)] == draft.tokens)
        accepted = torch.minimum(right.long().cumprod(1).sum(1), draft.lens)
        return draft.confidence[:, :model_gamma].cumprod(1).sum(1), accepted

    def asked(self, s: Sequence, model_gamma: int) -> torch.Tensor:
        """Return the anchors [M] int64 for which the server asks its model; all where it asks for none."""
        anchors, (expected, _) = torch.arange(*anchor_range(s)), self.along(s, model_gamma)
        asked = anchors[expected < LOOKUP_THRESHOLD]
        return asked if len(asked) else anchors

    def taken(self, expected: torch.Tensor, confidence: torch.Tensor) -> torch.Tensor:
        """Return where a lookup is served [N] bool. expected: [N], confidence: [N, gamma] of the model's drafts."""
        return (expected >= LOOKUP_THRESHOLD) | (expected >= self._run_length * confidence[:, 0])
