"""Filling a draft graph: from ranks to the states of a block (Spiffy, auto-speculation source).

The newest state's own distribution is what the forward will tell. Its predecessor's is known, and fills the nodes; what
has been revealed since is skipped, so ranks count the positions that are still masked.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    states: [R, D, B] int64 tokens. fits: [R, D] bool, whether the block has room for the node, and its tokens a chance;
    what does not fit is not to be read. local_scores: [R, D] float32, 0 where it does not fit.
    """

    states: np.ndarray
    fits: np.ndarray
    local_scores: np.ndarray


def ranked_positions(masked: np.ndarray, best: np.ndarray) -> np.ndarray:
    """[R, B] int64, masked positions by descending probability `best` [R, B], the others behind them.

    masked: [R, B] bool. Of two equal ones the left one is first.
    """
    return np.argsort(np.where(masked, -best, np.inf), axis=1, kind="stable")


def fill(graph: DraftGraph, blocks: np.ndarray, candidates: Candidates, mask_id: int) -> Filled:
    """The graph over the newest states `blocks` [R, B] int64, by what their predecessors' forwards said."""
    requests, size = blocks.shape
    count, kept = len(graph), candidates.tokens.shape[2]
    masked = blocks == mask_id
    order = ranked_positions(masked, candidates.probabilities[:, :, 0])
    used = graph.positions >= 0
    fits = (graph.positions < masked.sum(1)[:, None, None]) & (graph.ranks < kept) | ~used
    # What a node lacks is written to a position behind the block and taken away again.
    places = np.where(fits & used, order[:, np.minimum(graph.positions, size - 1)], size)
    rows, ranks = np.arange(requests)[:, None, None], np.clip(graph.ranks, 0, kept - 1)
    inside = np.minimum(places, size - 1)
    probabilities = np.where(used, candidates.probabilities[rows, inside, ranks], 1.0)
    states = np.empty((requests, count, size + 1), dtype=np.int64)
    states[:, :, :size] = blocks[:, None]
    np.put_along_axis(states, places, candidates.tokens[rows, inside, ranks], axis=2)
    fitting = (fits & (probabilities > 0)).all(2)
    return Filled(states[:, :, :size], fitting, local_scores(probabilities, graph.sizes) * fitting)


def local_scores(probabilities: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """[R, D] float32, the geometric mean of each node's probabilities (localScore of the paper's pruning).

    probabilities: [R, D, K], 1 behind a node's last pair. sizes: [D] pairs of each node.
    """
    product = np.prod(probabilities, axis=2, dtype=np.float64)
    return (product ** (1 / sizes)).astype(np.float32)
