"""A draft graph filled with a block's tokens, the order in which its states are drafted, and the accepted ones (Spiffy:
auto-speculation, dynamic graph pruning, lossless verification).

The distribution of a block's newest state is the result of the coming forward. Its predecessor's is known and fills the
nodes. Positions that have been revealed since are skipped, so ranks count the positions that are still masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from .graph import DraftGraph


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best J tokens of each position of R blocks of B positions, the most probable first.

    tokens: [R, B, J] int64, never the mask. probabilities: [R, B, J] float32.
    """

    tokens: np.ndarray
    probabilities: np.ndarray


@dataclass(frozen=True, slots=True)
class Filled:
    """The D nodes of a graph over R blocks.

    states: [R, D, B] int64 tokens. fits: [R, D] bool, whether the block has room for the node and its tokens are
    possible; other entries are undefined. local_scores: [R, D] float32, the geometric mean of the probabilities of the
    node's tokens; 0 where it does not fit.
    """

    states: np.ndarray
    fits: np.ndarray
    local_scores: np.ndarray


def ranked_positions(masked: np.ndarray, best: np.ndarray) -> np.ndarray:
    """[R, B] int64, masked positions by descending probability `best` [R, B], then the rest. masked: [R, B] bool."""
    return np.argsort(np.where(masked, -best, np.inf), axis=1, kind="stable")


def fill(graph: DraftGraph, blocks: np.ndarray, candidates: Candidates, mask_id: int) -> Filled:
    """The graph over the newest states `blocks` [R, B] int64. candidates: by their predecessors' distributions."""
    requests, size = blocks.shape
    kept = candidates.tokens.shape[2]
    masked = blocks == mask_id
    order = ranked_positions(masked, candidates.probabilities[:, :, 0])
    used = graph.positions >= 0
    fits = (graph.positions < masked.sum(1)[:, None, None]) & (graph.ranks < kept) | ~used
    # Unused pairs are written to a position after the block, which is then cut off.
    places = np.where(fits & used, order[:, np.minimum(graph.positions, size - 1)], size)
    rows, ranks = np.arange(requests)[:, None, None], np.clip(graph.ranks, 0, kept - 1)
    inside = np.minimum(places, size - 1)
    probabilities = np.where(used, candidates.probabilities[rows, inside, ranks], 1.0)
    states = np.empty((requests, len(graph), size + 1), dtype=np.int64)
    states[:, :, :size] = blocks[:, None]
    np.put_along_axis(states, places, candidates.tokens[rows, inside, ranks], axis=2)
    fitting = (fits & (probabilities > 0)).all(2)
    means = np.prod(probabilities, axis=2, dtype=np.float64) ** (1 / graph.sizes)
    return Filled(states[:, :, :size], fitting, means.astype(np.float32) * fitting)


def scores(graph: DraftGraph, filled: Filled) -> np.ndarray:
    """[R, D] float32, geometric means of each node's local score and its best child's score; 0 where it does not fit.

    The paper leaves open how children are combined, and the score of a leaf. Here the best child counts, since a
    trajectory takes one, and a leaf uses its local score twice.
    """
    result = filled.local_scores.astype(np.float64)
    for node, children in _inner(graph):
        own, best = result[:, node], result[:, children].max(1)
        result[:, node] = np.sqrt(own * np.where(best > 0, best, own))
    return result.astype(np.float32)


@cache
def _inner(graph: DraftGraph) -> list[tuple[int, np.ndarray]]:
    """Nodes with children, each with their numbers, children before parents."""
    nodes = [(node, np.flatnonzero(graph.leads[node])) for node in range(len(graph) - 1, -1, -1)]
    return [(node, children) for node, children in nodes if len(children)]


def admission_order(graph: DraftGraph, filled: Filled, values: np.ndarray, most: int | None = None) -> np.ndarray:
    """[R, most] int64 nodes in the order of admission, then -1: every prefix of a row is a graph to draft.

    The next node is the fitting one of the largest value [R, D] among children of the root and of admitted nodes; of
    equal ones the smaller number. most: nodes of each request; None: all.
    """
    requests, count = filled.fits.shape
    count = count if most is None else min(most, count)
    order = np.full((requests, count), -1, dtype=np.int64)
    waiting = filled.fits.copy()
    reached = np.broadcast_to(graph.leads[-1], waiting.shape).copy()
    each = np.arange(requests)
    for place in range(count):
        able = waiting & reached
        best = np.where(able, values, -np.inf).argmax(1)
        going = able[each, best]
        if not going.any():
            break
        order[going, place] = best[going]
        waiting[each[going], best[going]] = False
        reached[going] |= graph.leads[best[going]]
    return order


def follow(root: np.ndarray, drafts: Sequence[np.ndarray], stepped: Sequence[np.ndarray], mask_id: int) -> list[int]:
    """Numbers of the drafts that are accepted, in the order in which the block comes to them; often none.

    root: [B] int64, the newest state after its step. drafts: [B] int64 each. stepped: the same after their steps.
    A drafted state's row was computed as base decoding would have computed it, so the block goes on from there; a next
    state that was not drafted is the new root. So a block comes to the states of base decoding, whatever was drafted.
    """
    rows = {draft.tobytes(): number for number, draft in enumerate(drafts)}
    path: list[int] = []
    while (number := rows.pop(root.tobytes(), None)) is not None:
        path.append(number)
        if not (drafts[number] == mask_id).any():  # complete: a step leaves it as it is
            break
        root = stepped[number]
    return path
