"""Accepted length on known answers, without running the target.

At temperature 0 a verified block is exactly compared with the target's own answer, so every anchor's accepted run can
be computed teacher-forced; walking the answer from its first token with those runs gives tau as decoding would.

So it can at higher temperatures, on an answer the target drew at that temperature. Speculative sampling outputs x with
the target's chance p(x) and accepts a draft of it with min(p(x), q(x)) (Leviathan et al. 2023), so given the output x
the draft was accepted with chance min(1, q(x) / p(x)): drawing that at every position of the answer walks it as
decoding would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..acceptance import Acceptance
from ..block.model import BlockModel, TrainedModel
from ..diffusion.denoise import Schedule
from ..diffusion.model import DiffusionModel
from ..eagle.model import EagleModel
from .batches import BatchMaker, Step, anchor_range
from .forward import FrozenTarget, hidden_states
from .masked import block_states
from .paths import greedy_path, lattice, scores_behind
from .store import Sequence


@dataclass(frozen=True, slots=True)
class Chances:
    """The way an answer was drawn.

    probs: [S - prompt] the target's probability of every answer token at `temperature`, given the tokens before it.
    """

    probs: torch.Tensor
    prompt: int
    temperature: float
    generator: torch.Generator


def greedy_tokens(
    model: TrainedModel, frozen: FrozenTarget, hidden: torch.Tensor, anchors: torch.Tensor
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


def kept(logits: torch.Tensor, step: Step, columns: torch.Tensor, chances: Chances, first: int = 0) -> torch.Tensor:
    """[A, M] bool, acceptance of each token from the `first` behind the anchors on, drawn as speculative sampling would
    have; logits: [A, M, V'] float32 of these; columns: [V] draft column of every token, -1 where lacking."""
    reach = torch.arange(first + 1, first + 1 + logits.shape[1], device=logits.device)
    places = columns[step.tokens[:, reach].to(columns.device)].to(logits.device)
    drafted = (logits / chances.temperature).log_softmax(-1).gather(-1, places.clamp_min(0)[..., None])[..., 0]
    drafted = drafted.exp() * (places >= 0)
    place = step.anchor_positions[:, None] + reach - chances.prompt
    target = chances.probs[place.clamp_max(len(chances.probs) - 1)]
    points = torch.rand(target.shape, generator=chances.generator).to(target.device)
    return points * target < drafted


Hits = Callable[[Step, Chances | None], torch.Tensor]
"""Step -> tokens [A, gamma] bool behind its anchors that a draft hits: greedy, or drawn where there are chances."""


def block_hits(model: BlockModel | EagleModel, frozen: FrozenTarget, columns: torch.Tensor) -> Hits:
    """Hits of a block drafter or an EAGLE-3 head; columns: as of `kept`.

    A path's token behind one that is no candidate is never looked at: that one is not drafted.
    """

    def hits(step: Step, chances: Chances | None) -> torch.Tensor:
        hidden = hidden_states(model, frozen, step, step.valid.shape[1])
        if isinstance(model, BlockModel) and model.selector is not None:
            ids, scores = lattice(model, frozen, step, hidden)
            if chances is None:
                return greedy_path(ids, scores) == step.tokens[:, 1:]
            own, _ = scores_behind(step.tokens[:, :-1], ids, scores)
            logits = own.new_full((*own.shape[:2], len(frozen.head)), -torch.inf).scatter(-1, ids, own)
            return kept(logits, step, columns, chances)
        if chances is None:
            return greedy_tokens(model, frozen, hidden, step.anchors) == step.tokens[:, 1:]
        logits = (hidden @ frozen.head.T).float()
        if model.markov_head is not None:
            logits += model.markov_head.w2(model.markov_head.latents(step.tokens[:, :-1], hidden))
        return kept(logits, step, columns, chances)

    return hits


def denoised_hits(model: DiffusionModel, frozen: FrozenTarget, columns: torch.Tensor, schedule: Schedule) -> Hits:
    """Hits of a diffusion drafter that denoises from left to right: while it hits, what it reveals is the answer."""
    if schedule.pick is not None:
        raise ValueError("drafts can be followed along an answer where they are denoised from left to right alone")

    def hits(step: Step, chances: Chances | None) -> torch.Tensor:
        found, done = [], 0
        for count in schedule.counts:
            known = torch.arange(model.config.gamma - 1, device=step.anchors.device) < done
            states = block_states(model, frozen, step, step.tokens[:, :-1], known.expand(len(step.anchors), -1))
            logits = (states[:, done : done + count] @ frozen.head.T).float()
            if chances is None:
                tokens = model.vocab.to(logits.device)[logits.argmax(-1)]
                found.append(tokens == step.tokens[:, done + 1 : done + 1 + count])
            else:
                found.append(kept(logits, step, columns, chances, done))
            done += count
        return torch.cat(found, 1)

    return hits


def walk(runs: list[int], length: int, gamma: int) -> Acceptance:
    """Decode along an answer: `runs[i]` is the accepted run behind its token i; `length` tokens follow token 0.

    A step counts as verifying no further than the answer goes, so that a cut answer does not flatter tau.
    """
    _, verified, accepted = steps_along(runs, length, gamma)
    found = Acceptance.from_steps(verified, accepted, gamma)
    return Acceptance(found.cycles, length, found.tried, found.kept)


def steps_along(runs: list[int], length: int, gamma: int) -> tuple[list[int], list[int], list[int]]:
    """Steps of `walk`: the token each one is behind, how many draft tokens the answer lets it verify, and accept."""
    at, places, verified, accepted = 0, [], [], []
    while at < length:
        reach = min(gamma, length - at)
        run = min(runs[at], reach)
        places.append(at)
        verified.append(reach)
        accepted.append(run)
        at += run + 1
    return places, verified, accepted


def everywhere(runs: list[int], length: int, gamma: int) -> Acceptance:
    """One step from each token that another follows: the same ones for every drafter. Arguments as of `walk`."""
    reach = [min(gamma, length - at) for at in range(length)]
    return Acceptance.from_steps(reach, map(min, runs, reach), gamma)


Steps = Callable[[list[int], int, int], Acceptance]
"""`walk` or `everywhere`."""


@torch.inference_mode()
def sequence_acceptance(
    hits: Hits,
    maker: BatchMaker,
    s: Sequence,
    chances: Chances | None = None,
    *,
    steps: Steps = walk,
    chunk: int = 256,
) -> Acceptance:
    """Acceptance of drafting along one answer: greedy, or drawn where `chances` are given."""
    gamma = maker.config.gamma
    low, high = anchor_range(s)
    runs: list[int] = []
    for part in torch.arange(low, high).split(chunk):
        step = maker.cut([s], [part], gamma)
        right = hits(step, chances) & step.valid
        runs += right.long().cumprod(-1).sum(-1).tolist()
    return steps(runs, high - low, gamma)


def acceptance(hits: Hits, maker: BatchMaker, sequences: Iterable[Sequence]) -> Acceptance:
    """Acceptance of greedy drafting over several answers."""
    total = Acceptance.empty(maker.config.gamma)
    for s in sequences:
        total = total + sequence_acceptance(hits, maker, s)
    return total
