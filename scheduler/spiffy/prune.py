"""Pruning a filled graph to what is drafted (Spiffy, dynamic graph pruning).

A node's score is the geometric mean of its local score and its children's. The paper's notes leave two things open:
here the best child speaks for all of them, since a trajectory takes one, and a leaf's own local score stands for a
child's.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .fill import Filled
from .graph import DraftGraph


def scores(graph: DraftGraph, filled: Filled) -> np.ndarray:
    """[R, D] float32: score = GM(localScore, childScore); 0 where a node does not fit."""
    found = filled.local_scores.astype(np.float64)
    for node, children in _inner(graph):
        own, best = found[:, node], found[:, children].max(1)
        found[:, node] = np.sqrt(own * np.where(best > 0, best, own))
    return found.astype(np.float32)


@cache
def _inner(graph: DraftGraph) -> list[tuple[int, np.ndarray]]:
    """Nodes with children, each with their numbers, children before parents."""
    found = [(node, np.flatnonzero(graph.leads[node])) for node in range(len(graph) - 1, -1, -1)]
    return [(node, children) for node, children in found if len(children)]


def admission_order(graph: DraftGraph, filled: Filled, values: np.ndarray, most: int | None = None) -> np.ndarray:
    """[R, D] int64 nodes in the order of admission, -1 behind the last: every prefix of it is a graph to draft.

    values: [R, D]. Next comes the fitting node of the largest value of which the root or an admitted node is a parent;
    of equal ones the smaller node. So a node is admitted only with a parent admitted. most: of each request, [R, most];
    None: as many as there are.
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
