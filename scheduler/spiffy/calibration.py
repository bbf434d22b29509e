"""Choosing a draft graph by what base decoding does (Spiffy, offline graph calibration, algorithm 2).

Trajectories of base decoding are replayed: at each state, the states that follow it are named by ranks, relative to the
distribution of the state before, as a forward would have to draft them. What is met often is worth drafting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from .fill import Candidates, ranked_positions
from .graph import DraftGraph, Node

NODES = 10
"""D of a graph, of which a forward drafts the best D*."""
LONGEST = 7
"""Steps that are looked ahead."""
ROOT_NODE: Node = frozenset()


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The path of base decoding through one block.

    states: [n, B] int64, after each of its forwards in turn; the last may be complete. candidates: what each of these
    forwards said; of the last one it is not read, and may be left out.
    """

    states: np.ndarray
    candidates: Candidates


@dataclass(slots=True)
class Counts:
    """Counts of observed roots, nodes over them, and steps from node to node; the empty node is the root.

    A node of a graph of `NODES` is not more steps ahead than that, and is not counted if it is.
    """

    roots: int = 0
    nodes: Counter[Node] = field(default_factory=Counter)
    steps: Counter[tuple[Node, Node]] = field(default_factory=Counter)

    def add(self, trajectory: Trajectory, mask_id: int) -> None:
        """Count what follows each state of a trajectory but the last."""
        for root in range(len(trajectory.states) - 1):
            self.roots += 1
            before = ROOT_NODE
            for node in islice(following(trajectory, root, mask_id), NODES):
                self.nodes[node] += 1
                self.steps[before, node] += 1
                before = node

    def update(self, more: Counts) -> None:
        """Add what another one has counted."""
        self.roots += more.roots
        self.nodes.update(more.nodes)
        self.steps.update(more.steps)

    def to_json(self) -> dict[str, Any]:
        """The pairs that each step leads from, those that it leads to, and its count; nodes follow from these."""
        steps = [[sorted(before), sorted(after), count] for (before, after), count in self.steps.items()]
        return {"roots": self.roots, "steps": steps}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Counts:
        """Read what `to_json` wrote."""
        counts = cls(data["roots"])
        for before, after, count in data["steps"]:
            node = _node(after)
            counts.steps[_node(before), node] += count
            counts.nodes[node] += count
        return counts


def _node(pairs: Iterable[Iterable[int]]) -> Node:
    return frozenset((i, j) for i, j in pairs)


def following(trajectory: Trajectory, root: int, mask_id: int) -> Iterable[Node]:
    """The states behind state `root` as nodes, up to the first with a token that was not among the candidates."""
    states, known = trajectory.states, trajectory.candidates
    masked = states[root] == mask_id
    order = ranked_positions(masked[None], known.probabilities[root : root + 1, :, 0])[0]
    position_ranks = np.argsort(order)
    node = ROOT_NODE
    for earlier, later in zip(states[root:-1], states[root + 1 :], strict=True):
        pairs = set(node)
        for position in np.flatnonzero(earlier != later).tolist():
            rank = np.flatnonzero(known.tokens[root, position] == later[position])
            if not len(rank):
                return
            pairs.add((int(position_ranks[position]), int(rank[0])))
        node = frozenset(pairs)
        yield node


def steps_ahead(graph: DraftGraph, counts: Counts) -> float:
    """Mean steps beyond its own that a forward with all nodes of a graph finds, at most: where a trajectory comes back
    to the graph after a state that is none of its nodes, what is behind that is counted too."""
    return sum(counts.nodes[node] for node in graph.nodes) / max(counts.roots, 1)


def choose(counts: Counts, size: int = NODES, step_tokens: int | None = None) -> DraftGraph:
    """The connected graph of `size` nodes, or of all there are, that was met most often.

    Nodes are taken one by one: of those that the root or a node taken leads to, the one with the largest count; of
    equal ones that whose taken parents have more, and then smaller ranks. (Parents' counts added to a node's own would
    fill the graph with rare children of its most frequent node.) Edges are the steps that were met.
    step_tokens: how many tokens every step reveals, where that is fixed; edges then lead to all nodes with so many more
    pairs as well.
    """
    taken: dict[Node, list[Node]] = {}
    while len(taken) < size:
        able = {
            node: parents
            for node in counts.nodes.keys() - taken.keys()
            if (parents := _parents(node, taken, counts, step_tokens))
        }
        if not able:
            break
        best = max(able, key=lambda node: (*_worth(node, able[node], counts), [-len(node), *_first(node)]))
        taken[best] = able[best]
    return DraftGraph.of({node: _parents(node, taken, counts, step_tokens) for node in taken})


def _worth(node: Node, parents: Iterable[Node], counts: Counts) -> tuple[int, int]:
    return counts.nodes[node], sum(counts.nodes[parent] for parent in parents)


def _first(node: Node) -> list[int]:
    """Order of ties: smaller ranks first."""
    return [-rank for pair in sorted(node) for rank in pair]


def _parents(node: Node, taken: Iterable[Node], counts: Counts, step_tokens: int | None) -> list[Node]:
    return [
        parent
        for parent in (ROOT_NODE, *taken)
        if counts.steps[parent, node] or (parent < node and len(node) - len(parent) == step_tokens)
    ]


def untuned_graph(block_size: int, step_tokens: int | None, size: int = NODES) -> DraftGraph:
    """The graph of a target that nobody has calibrated: at most `size` nodes for blocks of `block_size` tokens.

    step_tokens: how many a step reveals; None: any number, so that an edge leads to every larger node. First come the
    states to which steps lead that reveal the most probable tokens in their order; then those in which the last token
    is the next position's, or the next best one.
    """
    step = step_tokens or 1
    sizes = range(step, min(step * LONGEST, block_size) + 1, step)
    chain = [frozenset((i, 0) for i in range(count)) for count in sizes]
    misses: list[Node] = []
    for node in chain:
        last = len(node) - 1
        before = node - {(last, 0)}
        misses += [before | {(last, 1)}] + ([before | {(last + 1, 0)}] if last + 1 < block_size else [])
    nodes = dict.fromkeys([*chain, *misses][:size])
    edges = {
        node: [
            parent
            for parent in (ROOT_NODE, *nodes)
            if parent < node and (step_tokens is None or len(node) - len(parent) == step_tokens)
        ]
        for node in nodes
    }
    return DraftGraph.of({node: parents for node, parents in edges.items() if parents})
