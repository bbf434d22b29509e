"""Accepted length on known answers, without running the target.

At temperature 0 a verified block is exactly compared with the target's own answer, so every anchor's accepted run can
be computed teacher-forced; walking the answer from its first token with those runs gives tau as decoding would.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..acceptance import Acceptance
from ..block.model import BlockModel
from .batches import BatchMaker, anchor_range
from .forward import Frozen, hidden_states
from .store import Sequence


def greedy_tokens(model: BlockModel, frozen: Frozen, hidden: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
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
    """Decode along an answer: `runs[i]` is the accepted run behind its token i; `length` tokens follow token 0.

    The last step counts as verifying no further than the answer goes, so that a cut answer does not flatter tau.
    """
    at, verified, accepted = 0, [], []
    while at < length:
        reach = min(gamma, length - at)
        run = min(runs[at], reach)
        verified.append(reach)
        accepted.append(run)
        at += run + 1
    found = Acceptance.from_steps(verified, accepted, gamma)
    return Acceptance(found.cycles, length, found.tried, found.kept)


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


def acceptance(model: BlockModel, frozen: Frozen, maker: BatchMaker, sequences: Iterable[Sequence]) -> Acceptance:
    """Acceptance of greedy drafting over several answers."""
    gamma = model.config.gamma
    total = Acceptance.empty(gamma)
    for s in sequences:
        total = total + sequence_acceptance(model, frozen, maker, s)
    return total
