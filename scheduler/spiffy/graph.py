"""The draft graph: states that a block may come to, named by ranks instead of tokens (Spiffy, directed draft graphs).

A node is a set of pairs (i, j) over the root, the block's newest state: at the masked position whose best token was
i-th most probable stands that position's j-th most probable token, both counted from 0. So a graph is chosen once, and
filled with tokens in every forward (`fill.py`).

An edge A -> B says that one denoising step may lead from A to B; B then has all pairs of A and at least one more. As
the model sees a block from both sides, several states lead to one: a node may have several parents, and stays worth a
look as long as one of them is accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Pair = tuple[int, int]
"""Position rank i, vocabulary rank j."""
Node = frozenset[Pair]
ROOT = -1
"""The parent that stands for the newest state itself."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftGraph:
    """D nodes, smaller ones first, so that parents stand before their children. Raises ValueError where it is none.

    nodes: D sets of pairs, all different. parents: of each node the numbers of its parents, or ROOT; at least one.

    positions, ranks: [D, K] int64, the pairs of each node by ascending position rank; -1 behind its last.
    sizes: [D] int64, pairs of each node. depths: [D] int64, steps that lead to it, at least.
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
        if len(self.nodes) != len(self.parents) or len(set(self.nodes)) != len(self.nodes):
            raise ValueError(f"{len(self.nodes)} different nodes have parents, not {len(self.parents)}")
        count = len(self.nodes)
        sizes = np.array([len(node) for node in self.nodes], dtype=np.int64)
        positions = np.full((count, int(sizes.max(initial=1))), -1, dtype=np.int64)
        ranks, leads = positions.copy(), np.zeros((count + 1, count), dtype=bool)
        depths = np.zeros(count + 1, dtype=np.int64)  # the root's is the last
        for number, (node, above) in enumerate(zip(self.nodes, self.parents, strict=True)):
            _check(number, node, [(parent, self._pairs(parent, number)) for parent in above])
            positions[number, : len(node)], ranks[number, : len(node)] = np.array(sorted(node)).T
            leads[list(above), number] = True
            depths[number] = depths[list(above)].min() + 1
        arrays = {"positions": positions, "ranks": ranks, "sizes": sizes, "depths": depths[:-1], "leads": leads}
        for name, value in arrays.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def vocabulary_ranks(self) -> int:
        """Tokens of a position that the graph needs."""
        return int(self.ranks.max(initial=0)) + 1

    def _pairs(self, parent: int, child: int) -> Node:
        if not ROOT <= parent < child:
            raise ValueError(f"node {child} has parent {parent}; expected one before it, or {ROOT} for the root")
        return self.nodes[parent] if parent != ROOT else frozenset()

    @classmethod
    def of(cls, edges: Mapping[Node, Iterable[Node]]) -> DraftGraph:
        """Each node's parents among the nodes; the empty set is the root."""
        nodes = sorted(edges, key=lambda node: (len(node), sorted(node)))
        number = {frozenset[Pair](): ROOT} | {node: place for place, node in enumerate(nodes)}
        return cls(tuple(nodes), tuple(tuple(sorted(number[parent] for parent in edges[node])) for node in nodes))

    # -- JSON -----------------------------------------------------------------------------------------------------

    def to_json(self) -> list[dict[str, Any]]:
        """A list of nodes, each with its pairs and the numbers of its parents."""
        return [
            {"pairs": [list(pair) for pair in sorted(node)], "parents": list(above)}
            for node, above in zip(self.nodes, self.parents, strict=True)
        ]

    @classmethod
    def from_json(cls, data: Any) -> DraftGraph:
        """Raises ValueError saying what is wrong with `data`."""
        try:
            nodes = tuple(frozenset((int(i), int(j)) for i, j in entry["pairs"]) for entry in data)
            parents = tuple(tuple(int(parent) for parent in entry["parents"]) for entry in data)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"a draft graph is a list of nodes with pairs [i, j] and parents: {error!r}") from None
        return cls(nodes, parents)


def _check(number: int, node: Node, parents: list[tuple[int, Node]]) -> None:
    if min((min(pair) for pair in node), default=-1) < 0:
        raise ValueError(f"node {number} has the pairs {sorted(node)}; expected at least one, ranks from 0 on")
    if len({position for position, _ in node}) < len(node):
        raise ValueError(f"node {number} has two tokens for one position: {sorted(node)}")
    if not parents:
        raise ValueError(f"node {number} has no parent, so no step leads to it")
    for parent, pairs in parents:
        if not pairs < node:
            raise ValueError(f"node {number} does not have all pairs of its parent {parent} and one more")
