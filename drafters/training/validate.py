"""Accepted length on known answers, without running the target.

At temperature 0 a verified block is exactly compared with the target's own answer, so every anchor's accepted run can
be computed teacher-forced; walking the answer from its first token with those runs gives tau as decoding would.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..block.model import BlockModel
from .batches import BatchMaker, anchor_range
from .forward import Frozen, hidden_states
from .store import Sequence


@dataclass(frozen=True, slots=True)
class Acceptance:
    """cycles: verification steps; tokens: tokens they yielded, bonus included.

    tried, kept: [gamma] how often position k was reached, and accepted when reached.
    """

    cycles: int
    tokens: int
    tried: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def accepted_length(self) -> float:
        """tau."""
        return self.tokens / max(1, self.cycles)

    @property
    def conditional(self) -> list[float]:
        """Acceptance of position k given that position k - 1 was accepted."""
        return [k / t if t else 0.0 for k, t in zip(self.kept, self.tried, strict=True)]

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            self.cycles + other.cycles,
            self.tokens + other.tokens,
            tuple(a + b for a, b in zip(self.tried, other.tried, strict=True)),
            tuple(a + b for a, b in zip(self.kept, other.kept, strict=True)),
        )


def greedy_tokens(
    model: BlockModel, frozen: Frozen, hidden: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """Blocks [A, gamma] drafted at temperature 0 from hidden states [A, gamma, d] behind anchors [A]."""
    head, previous, out = model.markov_head, anchors, []
    state = head.start(hidden) if head else hidden
    for k in range(hidden.shape[1]):
        logits = (hidden[:, k] @ frozen.head.T).float()
        if head:
            state, latent = head.step(state, head.w1(previous), hidden[:, k])
            logits += head.w2(latent)
        previous = model.vocab[logits.argmax(-1)]
        out.append(previous)
    return torch.stack(out, 1)


def walk(runs: list[int], length: int, gamma: int) -> Acceptance:
    """Decode along an answer: `runs[i]` is the accepted run behind its token i; `length` tokens follow token 0."""
    at = cycles = 0
    tried, kept = [0] * gamma, [0] * gamma
    while at < length:
        run = runs[at]
        cycles += 1
        for k in range(min(run + 1, gamma, length - at)):
            tried[k] += 1
            kept[k] += k < run
        at += run + 1
    return Acceptance(cycles, length, tuple(tried), tuple(kept))


@torch.inference_mode()
def sequence_acceptance(
    model: BlockModel, frozen: Frozen, maker: BatchMaker, s: Sequence, *, chunk: int = 256
) -> Acceptance:
    """Acceptance of greedy drafting along one answer."""
    gamma = model.config.gamma
    low, high = anchor_range(s)
    runs: list[int] = []
    for part in torch.arange(low, high).split(chunk):
        step = maker.cut([s], [part], gamma)
        drafted = greedy_tokens(model, frozen, hidden_states(model, frozen, step, gamma), step.anchors)
        right = (drafted == step.tokens[:, 1:]) & step.valid
        runs += right.long().cumprod(-1).sum(-1).tolist()
    return walk(runs, high - low, gamma)


def acceptance(
    model: BlockModel, frozen: Frozen, maker: BatchMaker, sequences: Iterable[Sequence]
) -> Acceptance:
    """Acceptance of greedy drafting over several answers."""
    gamma = model.config.gamma
    total = Acceptance(0, 0, (0,) * gamma, (0,) * gamma)
    for s in sequences:
        total = total + sequence_acceptance(model, frozen, maker, s)
    return total
