"""Accepted length on known answers, without running the target.

At temperature 0 a verified block is exactly compared with the target's own answer, so every anchor's accepted run can
be computed teacher-forced; walking the answer from its first token with these runs gives tau as decoding would.

This also works at higher temperatures, on an answer the target drew at that temperature. Speculative sampling outputs x
with the target's chance p(x) and accepts a draft of it with min(p(x), q(x)) (Leviathan et al. 2023). So given the
output x, the draft was accepted with chance min(1, q(x) / p(x)); drawing this at every position reproduces decoding.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from outrider.kernels.sampling import Rules

from ..acceptance import Acceptance
from ..base import DraftBatch
from ..block.model import BlockModel, TrainedModel
from ..block.sampling import sample_block, sample_parallel, sample_path
from ..confidence import own_confidence
from ..diffusion.denoise import Schedule, denoise
from ..diffusion.model import DiffusionModel
from ..eagle.model import EagleModel
from .batches import BatchMaker, TrainingStep, anchor_range
from .forward import FrozenTarget, hidden_states
from .masked import block_states
from .paths import lattice, scores_behind
from .store import Sequence


@dataclass(frozen=True, slots=True)
class Chances:
    """An answer's draw. probs: [S - prompt] the target's probability of every answer token at `temperature`,
    given the tokens before it."""

    probs: torch.Tensor
    prompt: int
    temperature: float
    generator: torch.Generator


Drafts = Callable[[TrainingStep], tuple[torch.Tensor, torch.Tensor]]
"""Maps a TrainingStep to tokens and confidences [A, gamma] drafted after its anchors, as served at temperature 0."""


def drafts_of(model: TrainedModel, frozen: FrozenTarget, schedule: Schedule | None) -> Drafts:
    """Return `Drafts` of any kind of drafter; schedule: of one that denoises."""
    if isinstance(model, DiffusionModel):
        assert schedule is not None
        return partial(denoised, model, frozen, schedule)
    assert isinstance(model, BlockModel | EagleModel)
    return partial(drafted, model, frozen)


def drafted(
    model: BlockModel | EagleModel, frozen: FrozenTarget, step: TrainingStep
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Drafts` of a block drafter or an EAGLE-3 head. The head drafts after the answer's tokens, which equal its own as
    far as they are accepted."""
    count, gamma = step.valid.shape
    zeros = step.anchors.new_zeros(count)
    batch = DraftBatch(
        anchors=step.anchors, seq_lens=zeros, page_table=zeros[:0, None].int(), rows=zeros,
        temperatures=zeros.float(), keys=zeros[:, None].expand(-1, gamma), all_greedy=True, wants_probs=False,
    )  # fmt: skip
    hidden = hidden_states(model, frozen, step, gamma)
    if isinstance(model, BlockModel) and model.selector is not None:
        paths = lattice(model, frozen, step, hidden)
        tokens, _, confidence = sample_path(*paths, batch, vocab_size=model.config.vocab_size)
        return tokens, confidence
    logits = hidden @ frozen.head.T
    if isinstance(model, EagleModel):
        q = logits.float().softmax(-1)
        sure = own_confidence(q.flatten(0, 1), batch.temperatures.repeat_interleave(gamma))
        return model.vocab[q.argmax(-1)], sure.view(count, gamma)
    if model.markov_head is None:
        tokens, _, confidence = sample_parallel(logits, batch, vocab=model.vocab)
    else:
        markov, confident = model.markov_head, model.confidence_head
        tokens, _, confidence = sample_block(
            logits, hidden, batch, vocab=model.vocab, markov=markov, confidence=confident
        )
    return tokens, confidence


def denoised(
    model: DiffusionModel, frozen: FrozenTarget, schedule: Schedule, step: TrainingStep
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Drafts` of a diffusion drafter."""
    count, gamma = step.valid.shape
    zeros = step.anchors.new_zeros(count)

    def predict(
        tokens: torch.Tensor, revealed: torch.Tensor, columns: slice
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ids = torch.cat([step.anchors[:, None], tokens[:, :-1]], 1)
        states = block_states(model, frozen, step, ids, revealed[:, :-1])[:, columns]
        sure = model.confidence_head
        return states @ frozen.head.T, None if sure is None else torch.sigmoid(sure(states, states).float())

    tokens, _, confidence = denoise(
        predict, schedule, Rules(zeros.float()), zeros[:, None].expand(-1, gamma), vocab=model.vocab, wants_probs=False,
        all_greedy=True,
    )  # fmt: skip
    return tokens, confidence


def kept(logits: torch.Tensor, step: TrainingStep, columns: torch.Tensor, chances: Chances) -> torch.Tensor:
    """Return [A, M] bool, acceptance of each token after the anchors, drawn as speculative sampling would have. logits:
    [A, M, V'] float32 of these tokens. columns: [V] draft column of every token, -1 where lacking."""
    reach = torch.arange(1, 1 + logits.shape[1], device=logits.device)
    places = columns[step.tokens[:, reach].to(columns.device)].to(logits.device)
    drafted = (logits / chances.temperature).log_softmax(-1).gather(-1, places.clamp_min(0)[..., None])[..., 0]
    drafted = drafted.exp() * (places >= 0)
    place = step.anchor_positions[:, None] + reach - chances.prompt
    target = chances.probs[place.clamp_max(len(chances.probs) - 1)]
    points = torch.rand(target.shape, generator=chances.generator).to(target.device)
    return points * target < drafted


Hits = Callable[[TrainingStep, Chances | None], torch.Tensor]
"""Maps a step to [A, gamma] bool, which tokens after its anchors a draft hits: greedy, or drawn if chances are
given."""


def hits_of(model: TrainedModel, frozen: FrozenTarget, columns: torch.Tensor, schedule: Schedule | None) -> Hits:
    """Return `Hits` of any kind of drafter; columns: as in `kept`, schedule: as in `drafts_of`. Draft tokens after the
    first miss are never looked at, since the miss ends the draft."""
    drafts = drafts_of(model, frozen, schedule)

    def hits(step: TrainingStep, chances: Chances | None) -> torch.Tensor:
        if chances is None:
            return drafts(step)[0] == step.tokens[:, 1:]
        return kept(logits_along(model, frozen, step, schedule), step, columns, chances)

    return hits


def logits_along(
    model: TrainedModel, frozen: FrozenTarget, step: TrainingStep, schedule: Schedule | None
) -> torch.Tensor:
    """Return logits [A, gamma, V'] float32 of every token after the anchors, given the answer's tokens before it."""
    if isinstance(model, DiffusionModel):
        assert schedule is not None
        states, done = [], 0
        for count in schedule:
            known = torch.arange(model.config.gamma - 1, device=step.anchors.device) < done
            block = block_states(model, frozen, step, step.tokens[:, :-1], known.expand(len(step.anchors), -1))
            states.append(block[:, done : done + count])
            done += count
        return (torch.cat(states, 1) @ frozen.head.T).float()
    assert isinstance(model, BlockModel | EagleModel)
    hidden = hidden_states(model, frozen, step, step.valid.shape[1])
    if isinstance(model, BlockModel) and model.selector is not None:
        ids, scores = lattice(model, frozen, step, hidden)
        along, _ = scores_behind(step.tokens[:, :-1], ids, scores)
        return along.new_full((*along.shape[:2], len(frozen.head)), -torch.inf).scatter(-1, ids, along)
    logits = (hidden @ frozen.head.T).float()
    if model.markov_head is not None:
        logits += model.markov_head.w2(model.markov_head.latents(step.tokens[:, :-1], hidden))
    return logits


def walk(runs: list[int], length: int, gamma: int) -> Acceptance:
    """Decode along an answer: `runs[i]` is the accepted run after its token i; `length` tokens follow token 0. A step
    counts as verifying no further than the answer goes, so that a cut answer does not flatter tau."""
    _, verified, accepted = steps_along(runs, length, gamma)
    acceptance = Acceptance.from_steps(verified, accepted, gamma)
    return Acceptance(acceptance.cycles, length, acceptance.tried, acceptance.kept)


def steps_along(runs: list[int], length: int, gamma: int) -> tuple[list[int], list[int], list[int]]:
    """Return the steps of `walk`: the token each follows, how many draft tokens the answer lets it verify, and
    accept."""
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
    """Count one step from each token that another follows, the same ones for every drafter; arguments as in `walk`."""
    reach = [min(gamma, length - at) for at in range(length)]
    return Acceptance.from_steps(reach, map(min, runs, reach), gamma)


Steps = Callable[[list[int], int, int], Acceptance]
"""`walk` or `everywhere`."""


CHUNK = 64
"""Anchors drafted for at once: their logits are in memory."""


def runs_along(maker: BatchMaker, s: Sequence, hits: Callable[[TrainingStep], torch.Tensor]) -> list[int]:
    """Return how many draft tokens are accepted after each token of an answer that has a successor. hits: [A, gamma]
    bool of a step."""
    runs: list[int] = []
    for part in torch.arange(*anchor_range(s)).split(CHUNK):
        step = maker.cut([s], [part], maker.config.gamma)
        runs += (hits(step) & step.valid).long().cumprod(-1).sum(-1).tolist()
    return runs


@torch.inference_mode()
def acceptance(
    hits: Hits, maker: BatchMaker, sequences: Iterable[Sequence], chances: Chances | None = None, *, steps: Steps = walk
) -> Acceptance:
    """Return the acceptance of drafting along answers: greedy, or drawn where `chances` are given."""
    total = Acceptance.empty(maker.config.gamma)
    for s in sequences:
        runs = runs_along(maker, s, lambda step: hits(step, chances))
        total += steps(runs, len(runs), maker.config.gamma)
    return total
