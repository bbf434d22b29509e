"""Choosing a draft graph by base decoding (Spiffy, offline graph calibration, algorithm 2).

Trajectories of base decoding are replayed. At each state, the states that follow it are named by ranks in the
distribution of the state before, as a forward would have to draft them. The nodes met most often are drafted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from .fill import Candidates, ranked_positions
from .graph import ROOT_NODE, DraftGraph, Node

NODES = 10
"""Nodes of a graph (D in the paper), of which a forward drafts the best D*."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The path of base decoding through one block.

    states: [n, B] int64, the block's tokens before and after each forward; the last may be complete. candidates: by the
    distribution of each state; the last state's are not read, and may be left out.
    """

    states: np.ndarray
    candidates: Candidates


@dataclass(slots=True)
class NodeCounts:
    """NodeCounts of observed roots, of nodes over them, and of steps from node to node; the empty node is the root.

    Nodes more than `NODES` steps ahead are not counted.
    """

    roots: int = 0
    nodes: Counter[Node] = field(default_factory=Counter)
    steps: Counter[tuple[Node, Node]] = field(default_factory=Counter)

    def add(self, trajectory: Trajectory, mask_id: int) -> None:
        """Count the nodes that follow each state of a trajectory but the last."""
        for root in range(len(trajectory.states) - 1):
            self.roots += 1
            before = ROOT_NODE
            for node in islice(following(trajectory, root, mask_id), NODES):
                self.nodes[node] += 1
                self.steps[before, node] += 1
                before = node

    def update(self, more: NodeCounts) -> None:
        """Add other counts."""
        self.roots += more.roots
        self.nodes.update(more.nodes)
        self.steps.update(more.steps)

    def to_json(self) -> dict[str, Any]:
        """Steps as pairs before, pairs after and their count; nodes follow from these."""
        steps = [[sorted(before), sorted(after), count] for (before, after), count in self.steps.items()]
        return {"roots": self.roots, "steps": steps}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> NodeCounts:
        """Read `to_json`."""
        counts = cls(data["roots"])
        for before, after, count in data["steps"]:
            step = frozenset((i, j) for i, j in before), frozenset((i, j) for i, j in after)
            counts.steps[step] += count
            counts.nodes[step[1]] += count
        return counts


def following(trajectory: Trajectory, root: int, mask_id: int) -> Iterator[Node]:
    """The states after state `root` as nodes, up to the first with a token that was not among the candidates."""
    states, known = trajectory.states, trajectory.candidates
    masked = states[root] == mask_id
    position_ranks = np.argsort(ranked_positions(masked[None], known.probabilities[root : root + 1, :, 0])[0])
    node = ROOT_NODE
    for earlier, later in zip(states[root:-1], states[root + 1 :], strict=True):
        for position in np.flatnonzero(earlier != later).tolist():
            rank = np.flatnonzero(known.tokens[root, position] == later[position])
            if not len(rank):
                return
            node |= {(int(position_ranks[position]), int(rank[0]))}
        yield node


def steps_ahead(graph: DraftGraph, counts: NodeCounts) -> float:
    """Upper bound of the mean further steps of a forward that drafts all nodes of a graph: every node that a trajectory
    meets counts, even after a state outside the graph."""
    return sum(counts.nodes[node] for node in graph.nodes) / max(counts.roots, 1)


def choose(counts: NodeCounts, size: int = NODES, step_tokens: int | None = None) -> DraftGraph:
    """The connected graph of at most `size` nodes that were met most often.

    Nodes are taken one by one: the most counted node to which the root or a taken node leads; of equal ones the node
    with more counts of its taken parents, then with smaller ranks. (The sum of a node's and its parents' counts would
    take rare children of the most frequent node.) step_tokens: tokens that every step reveals, if fixed; edges then
    also lead to every node with that many more pairs.
    """

    def parents(node: Node) -> list[Node]:
        return [
            parent
            for parent in (ROOT_NODE, *taken)
            if counts.steps[parent, node] or _leads(parent, node, (step_tokens,))
        ]

    taken: list[Node] = []
    while len(taken) < size:
        able = {node: above for node in counts.nodes.keys() - set(taken) if (above := parents(node))}
        if not able:
            break
        ranks = {node: [-rank for pair in sorted(node) for rank in pair] for node in able}
        worth = {node: (counts.nodes[node], sum(counts.nodes[parent] for parent in able[node])) for node in able}
        taken.append(max(able, key=lambda node: (*worth[node], -len(node), ranks[node])))
    return DraftGraph.of({node: parents(node) for node in taken})


def untuned_graph(block_size: int, step_tokens: int | None, size: int = NODES) -> DraftGraph:
    """The graph of an uncalibrated target: at most `size` nodes for blocks of `block_size` tokens.

    step_tokens: tokens that a step reveals; None: any number. First come states up to seven steps ahead that reveal the
    most probable tokens in their order, then states that differ from these in the last token: the next best token
    there, or the best one of the next position.
    """
    step = step_tokens or 1
    chain = [frozenset((i, 0) for i in range(n)) for n in range(step, min(step * 7, block_size) + 1, step)]
    misses: list[Node] = []
    for node in chain:
        last = len(node) - 1
        before = node - {(last, 0)}
        misses += [before | {(last, 1)}] + ([before | {(last + 1, 0)}] if last + 1 < block_size else [])
    nodes = dict.fromkeys([*chain, *misses][:size])
    more = range(1, block_size + 1) if step_tokens is None else (step_tokens,)
    edges = {node: [parent for parent in (ROOT_NODE, *nodes) if _leads(parent, node, more)] for node in nodes}
    return DraftGraph.of({node: parents for node, parents in edges.items() if parents})


def _leads(before: Node, after: Node, step_tokens: Container[int | None]) -> bool:
    """True if a step that reveals `step_tokens` may lead from one node to the other."""
    return before < after and len(after) - len(before) in step_tokens
