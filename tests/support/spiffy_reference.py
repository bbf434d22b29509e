"""Base decoding and Spiffy of one block in plain Python: the reference for the server's batched decoding."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

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
