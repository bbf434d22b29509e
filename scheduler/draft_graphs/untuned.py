"""The graph of a target that nobody has calibrated: the most probable tokens in their order, and near misses."""

from __future__ import annotations

from .calibration import NODES
from .graph import DraftGraph, Node

LONGEST = 7
"""Steps that are looked ahead."""


def untuned_graph(block_size: int, step_tokens: int | None, size: int = NODES) -> DraftGraph:
    """A graph of at most `size` nodes for blocks of `block_size` tokens.

    step_tokens: how many a step reveals; None: any number, so that an edge leads to every larger node. First come the
    states to which steps lead that reveal the most probable tokens in their order; then those in which the last token
    is the next position's, or the next best one.
    """
    step = step_tokens or 1
    chain = [_first(count) for count in range(step, min(step * LONGEST, block_size) + 1, step)]
    misses: list[Node] = []
    for node in chain:
        last = len(node) - 1
        before = node - {(last, 0)}
        misses += [before | {(last, 1)}] + ([before | {(last + 1, 0)}] if last + 1 < block_size else [])
    nodes = dict.fromkeys([*chain, *misses][:size])
    root: Node = frozenset()
    edges = {
        node: [
            parent
            for parent in (root, *nodes)
            if parent < node and (step_tokens is None or len(node) - len(parent) == step_tokens)
        ]
        for node in nodes
    }
    return DraftGraph.of({node: parents for node, parents in edges.items() if parents})


def _first(count: int) -> Node:
    return frozenset((i, 0) for i in range(count))
