"""The draft graph: states that a block may come to, named by ranks instead of tokens (Spiffy, directed draft graphs).

A node is a set of pairs (i, j) over the root, the block's newest state. Of the masked positions, ordered by the
probability of their best token, the i-th shows its j-th most probable token; both count from 0. So a graph is chosen
once and filled with tokens in every forward (`fill.py`).

An edge A -> B says that one denoising step may lead from A to B; B then has all pairs of A and at least one more. As
the model sees a block from both sides, several states lead to one: a node may have several parents, and it can be
reached as long as one of them is accepted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

Pair = tuple[int, int]
"""Position rank i, vocabulary rank j."""
Node = frozenset[Pair]
ROOT_NODE: Node = frozenset()
ROOT = -1
"""The root's number, as a parent."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftGraph:
    """D nodes, smaller ones first, so that parents precede their children. Raises ValueError for a wrong graph.

    nodes: D sets of pairs, all different. parents: numbers of each node's parents, or ROOT; at least one.

    positions, ranks: [D, K] int64, the pairs of each node by ascending position rank; -1 after its last.
    sizes: [D] int64, pairs of each node. depths: [D] int64, fewest steps from the root to the node.
    leads: [D + 1, D] bool, whether an edge leads from a node, in the last row from the root, to another.
    """

    nodes: tuple[Node, ...]
    parents: tuple[tuple[int, ...], ...]
    positions: np.ndarray = field(init=False)
    ranks: np.ndarray = field(init=False)
    sizes: np.ndarray = field(init=False)
    depths: np.ndarray = field(init=False)
    leads: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.nodes)
        if count != len(self.parents) or count != len(set(self.nodes)):
            raise ValueError(f"{count} different nodes have parents, not {len(self.parents)}")
        sizes = np.array([len(node) for node in self.nodes], dtype=np.int64)
        positions = np.full((count, int(sizes.max(initial=1))), -1, dtype=np.int64)
        ranks, leads = positions.copy(), np.zeros((count + 1, count), dtype=bool)
        depths = np.zeros(count + 1, dtype=np.int64)  # the root's is the last
        for number, (node, parents) in enumerate(zip(self.nodes, self.parents, strict=True)):
            self._check(number, node, parents)
            positions[number, : len(node)], ranks[number, : len(node)] = np.array(sorted(node)).T
            leads[list(parents), number] = True
            depths[number] = depths[list(parents)].min() + 1
        arrays = {"positions": positions, "ranks": ranks, "sizes": sizes, "depths": depths[:-1], "leads": leads}
        for name, value in arrays.items():
            object.__setattr__(self, name, value)

    def _check(self, number: int, node: Node, parents: tuple[int, ...]) -> None:
        if min((min(pair) for pair in node), default=-1) < 0:
            raise ValueError(f"node {number} has the pairs {sorted(node)}; expected at least one, ranks from 0 on")
        if len({position for position, _ in node}) < len(node):
            raise ValueError(f"node {number} has two tokens for one position: {sorted(node)}")
        if not parents:
            raise ValueError(f"node {number} has no parent, so no step leads to it")
        for parent in parents:
            if not ROOT <= parent < number:
                raise ValueError(f"node {number} has parent {parent}; expected one before it, or {ROOT} for the root")
            if parent != ROOT and not self.nodes[parent] < node:
                raise ValueError(f"node {number} does not have all pairs of its parent {parent} and one more")

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def vocabulary_ranks(self) -> int:
        """Tokens of a position that the graph needs."""
        return int(self.ranks.max(initial=0)) + 1

    @classmethod
    def of(cls, edges: Mapping[Node, Iterable[Node]]) -> Self:
        """The graph of these nodes, each with its parents among them; the empty set is the root."""
        nodes = sorted(edges, key=lambda node: (len(node), sorted(node)))
        number = {ROOT_NODE: ROOT} | {node: place for place, node in enumerate(nodes)}
        return cls(tuple(nodes), tuple(tuple(sorted(number[parent] for parent in edges[node])) for node in nodes))

    # -- JSON -----------------------------------------------------------------------------------------------------

    def to_json(self) -> list[dict[str, Any]]:
        """A list of nodes, each with its pairs and the numbers of its parents."""
        return [
            {"pairs": [list(pair) for pair in sorted(node)], "parents": list(parents)}
            for node, parents in zip(self.nodes, self.parents, strict=True)
        ]

    @classmethod
    def from_json(cls, data: Any) -> Self:
        nodes = tuple(frozenset((int(i), int(j)) for i, j in entry["pairs"]) for entry in data)
        return cls(nodes, tuple(tuple(int(parent) for parent in entry["parents"]) for entry in data))
