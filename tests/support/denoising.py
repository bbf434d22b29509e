"""Base decoding and Spiffy of one block in plain Python, the reference for the server's batched decoding; a tiny random
denoiser and the policies of base decoding, to test Spiffy's loop without a model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
import torch

from outrider.kernels.noise import Purpose, gumbel_argmax, streams, substreams, torch_exponentials
from outrider.scheduler.spiffy.calibration import NodeCounts, Trajectory, choose
from outrider.scheduler.spiffy.fill import Candidates, admission_order, fill, follow, scores
from outrider.scheduler.spiffy.graph import DraftGraph

Denoiser = Callable[[np.ndarray], np.ndarray]
"""A model: from states [N, B] int64 to distributions [N, B, V], each of its state alone; the mask's is 0."""
Policy = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""An unmasking policy: from a state [B] and its distribution [B, V] to the next state [B], with a token more at
least."""
Ranking = Callable[[np.ndarray, np.ndarray], Candidates]
"""A drafter: from the predecessor's distribution [B, V] and a block's newest state [B] to its candidates."""


@dataclass(slots=True)
class Decoded:
    """states: the trajectory. forwards: their number. drafted, accepted: draft states. committed: a forward included
    the complete state, so that its keys and values are cached."""

    states: list[np.ndarray] = field(default_factory=list)
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: bool = False


def base_decode(denoise: Denoiser, policy: Policy, block: np.ndarray, mask_id: int) -> Decoded:
    """One forward per step until no mask is left."""
    result = Decoded([block])
    while (result.states[-1] == mask_id).any():
        state = result.states[-1]
        result.states.append(policy(state, denoise(state[None])[0]))
        result.forwards += 1
    return result


def spiffy_decode(
    denoise: Denoiser, policy: Policy, block: np.ndarray, mask_id: int, *, graph: DraftGraph, budget: int, rank: Ranking
) -> Decoded:
    """Algorithm 1 of the paper: every forward but the first drafts `budget` states of `graph` (D*)."""
    result, known = Decoded([block]), None
    while ((root := result.states[-1]) == mask_id).any():
        drafts = root[None][:0] if known is None else _drafts(graph, root, rank(known, root), mask_id, budget)
        distributions = denoise(np.concatenate([root[None], drafts]))
        result.forwards += 1
        result.drafted += len(drafts)
        stepped = [policy(state, p) for state, p in zip([root, *drafts], distributions, strict=True)]
        path = follow(stepped[0], list(drafts), stepped[1:], mask_id)
        result.accepted += len(path)
        result.states.append(stepped[0])
        known = distributions[0]
        for number in path:
            known = distributions[1 + number]
            if (drafts[number] == mask_id).any():
                result.states.append(stepped[1 + number])
            else:
                result.committed = True
    return result


def _drafts(graph: DraftGraph, root: np.ndarray, candidates: Candidates, mask_id: int, budget: int) -> np.ndarray:
    filled = fill(graph, root[None], candidates, mask_id)
    order = admission_order(graph, filled, scores(graph, filled))[0, :budget]
    drafts: np.ndarray = filled.states[0, order[order >= 0]]
    return drafts


def best_candidates(distribution: np.ndarray, kept: int) -> Candidates:
    """The `kept` most probable tokens of each position, from one block's distribution [B, V]."""
    tokens = np.argsort(-distribution, axis=1, kind="stable")[:, :kept]
    return Candidates(tokens[None], np.take_along_axis(distribution, tokens, axis=1)[None].astype(np.float32))


MASK = 0


def denoiser(size: int, vocabulary: int, *, unrest: float, firmness: float = 2.0, seed: int = 0) -> Denoiser:
    """Distributions that change little from state to state, more with `unrest`."""
    firm = np.random.default_rng(seed).normal(size=(size, vocabulary)) * firmness

    def denoise(states: np.ndarray) -> np.ndarray:
        distributions = []
        for state in states:
            rng = np.random.default_rng(crc32(np.ascontiguousarray(state, dtype=np.int64).tobytes()) + seed)
            logits = firm + unrest * rng.normal(size=firm.shape)
            logits[:, MASK] = -np.inf
            weights = np.exp(logits - logits.max(1, keepdims=True))
            distributions.append(weights / weights.sum(1, keepdims=True))
        return np.array(distributions)

    return denoise


def noise(state: np.ndarray, seed: int) -> torch.Tensor:
    """[B] keys by seed, position and tokens revealed so far."""
    step = streams(torch.tensor([seed]), torch.tensor([int((state != MASK).sum())]), Purpose.TOKEN)
    return substreams(step, len(state))[0]


def draw(distribution: np.ndarray, state: np.ndarray, seed: int | None) -> np.ndarray:
    """[B] tokens of every position; the most probable ones without a seed."""
    if seed is None:
        return distribution.argmax(1)
    return gumbel_argmax(torch.from_numpy(distribution.astype(np.float32)), noise(state, seed)).numpy()


def candidates(distribution: np.ndarray, state: np.ndarray, seed: int | None, kept: int) -> Candidates:
    """Candidates of a block: with a seed, ordered by the noise of its next step."""
    if seed is None:
        return best_candidates(distribution, kept)
    exponentials = torch_exponentials(noise(state, seed), torch.arange(distribution.shape[1])).numpy()
    with np.errstate(divide="ignore"):
        tokens = np.argsort(exponentials / distribution.astype(np.float32), axis=1, kind="stable")[:, :kept]
    return Candidates(tokens[None], np.take_along_axis(distribution, tokens, axis=1)[None].astype(np.float32))


def static(tokens: int, seed: int | None = None) -> Policy:
    """Reveals the `tokens` most probable drawn tokens."""

    def step(state: np.ndarray, distribution: np.ndarray) -> np.ndarray:
        drawn = draw(distribution, state, seed)
        confidence = np.where(state == MASK, distribution[np.arange(len(state)), drawn], -1)
        going = np.argsort(-confidence, kind="stable")[:tokens]
        going = going[confidence[going] >= 0]
        after = state.copy()
        after[going] = drawn[going]
        return after

    return step


def threshold(least: float, seed: int | None = None) -> Policy:
    """Reveals drawn tokens with a probability above `least`, else the most probable one."""

    def step(state: np.ndarray, distribution: np.ndarray) -> np.ndarray:
        drawn = draw(distribution, state, seed)
        confidence = np.where(state == MASK, distribution[np.arange(len(state)), drawn], -1)
        going = confidence > least
        if not going.any():
            going = np.arange(len(state)) == confidence.argmax()
        return np.where(going, drawn, state)

    return step


def trajectory(denoise: Denoiser, policy: Policy, block: np.ndarray, kept: int) -> Trajectory:
    states = np.array(base_decode(denoise, policy, block, MASK).states)
    each = [best_candidates(p, kept) for p in denoise(states)]
    tokens, probabilities = (np.concatenate(x) for x in zip(*((c.tokens, c.probabilities) for c in each), strict=True))
    return Trajectory(states, Candidates(tokens, probabilities))


def calibrated(denoise: Denoiser, policy: Policy, size: int, *, kept: int = 3, step_tokens: int | None) -> DraftGraph:
    """A graph calibrated on blocks with different beginnings."""
    counts = NodeCounts()
    for begun in range(1, 9):
        block = np.full(size, MASK)
        block[begun % size] = 1 + begun % 3
        counts.add(trajectory(denoise, policy, block, kept), MASK)
    return choose(counts, step_tokens=step_tokens)
