"""Draft graphs."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.profiles import draft_graphs
from outrider.profiles.draft_graphs import GraphError, GraphFingerprint
from outrider.scheduler.spiffy.calibration import NodeCounts, Trajectory, choose, following, steps_ahead
from outrider.scheduler.spiffy.fill import Candidates, admission_order, fill, follow, ranked_positions, scores
from outrider.scheduler.spiffy.graph import ROOT, DraftGraph

MASK = 99
HERE = GraphFingerprint(model="abc", policy="static 1", block_size=4, temperature="greedy")


def node(*pairs: tuple[int, int]) -> frozenset[tuple[int, int]]:
    return frozenset(pairs)


CHAIN = DraftGraph.of(
    {
        node((0, 0)): [node()],
        node((0, 0), (1, 0)): [node((0, 0)), node((1, 0))],
        node((1, 0)): [node()],
        node((0, 0), (1, 0), (2, 1)): [node((0, 0), (1, 0))],
    }
)


@st.composite
def graphs(draw: st.DrawFn) -> DraftGraph:
    """Each node extends an earlier node, or the root, by further pairs."""
    edges: dict[frozenset[tuple[int, int]], set[frozenset[tuple[int, int]]]] = {}
    for _ in range(draw(st.integers(1, 10))):
        parent = draw(st.sampled_from([node(), *sorted(edges, key=sorted)]))
        free = [i for i in range(6) if i not in {position for position, _ in parent}]
        if free:
            more = draw(st.dictionaries(st.sampled_from(free), st.integers(0, 2), min_size=1, max_size=2))
            edges.setdefault(parent | frozenset(more.items()), set()).add(parent)
    return DraftGraph.of(edges)


@st.composite
def blocks(draw: st.DrawFn, requests: int = 2, size: int = 5, kept: int = 3) -> tuple[np.ndarray, Candidates]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens = np.array([[rng.permutation(20)[:kept] for _ in range(size)] for _ in range(requests)])
    weights = rng.choice([0.0, 0.125, 0.25, 0.5], size=(requests, size, kept))  # few values: ties are common
    masked = rng.random((requests, size)) < draw(st.floats(0, 1))
    shown = rng.integers(20, 30, size=(requests, size))
    probabilities = -np.sort(-weights, axis=2).astype(np.float32)
    return np.where(masked, MASK, shown), Candidates(tokens, probabilities)


# -- the graph --------------------------------------------------------------------------------------------------------


def test_smaller_nodes_come_first_and_edges_lead_to_their_extensions():
    assert [len(n) for n in CHAIN.nodes] == [1, 1, 2, 3]
    assert CHAIN.parents == ((ROOT,), (ROOT,), (0, 1), (2,))
    assert CHAIN.leads.astype(int).tolist() == [[0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 0, 0]]
    assert CHAIN.depths.tolist() == [1, 1, 2, 3]
    assert CHAIN.vocabulary_ranks == 2


@given(graphs())
def test_json_round_trips(graph):
    again = draft_graphs.from_json(draft_graphs.to_json(graph, HERE), HERE)
    assert again.nodes == graph.nodes
    assert again.parents == graph.parents


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "def"}, "model 'def', here 'abc'"),
        ({"policy": "threshold 0.9"}, "policy 'threshold 0.9', here 'static 1'"),
        ({"block_size": 8}, "block size 8, here 4"),
        ({"temperature": "sampled"}, "temperature 'sampled', here 'greedy'"),
    ],
)
def test_a_graph_of_another_target_is_refused(change, says):
    data = draft_graphs.to_json(CHAIN, HERE)
    data["fingerprint"] |= change
    with pytest.raises(GraphError, match=says):
        draft_graphs.from_json(data, HERE)


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([{"pairs": [[0, 0]], "parents": []}], "no parent"),
        ([{"pairs": [], "parents": [-1]}], "at least one"),
        ([{"pairs": [[0, -1]], "parents": [-1]}], "from 0 on"),
        ([{"pairs": [[0, 0], [0, 1]], "parents": [-1]}], "two tokens for one position"),
        ([{"pairs": [[0, 0]], "parents": [0]}], "expected one before it"),
        (
            [{"pairs": [[0, 0]], "parents": [-1]}, {"pairs": [[1, 0], [2, 0]], "parents": [0]}],
            "all pairs of its parent",
        ),
        ([{"pairs": [[0, 0]], "parents": [-1]}] * 2, "different nodes"),
        ([{"pairs": 7, "parents": [-1]}], "is damaged"),
        ("nothing", "is damaged"),
    ],
)
def test_invalid_graphs_are_refused(nodes, says):
    with pytest.raises(GraphError, match=says):
        draft_graphs.from_json({"fingerprint": vars_of(HERE), "nodes": nodes}, HERE)


def vars_of(here: GraphFingerprint) -> dict[str, object]:
    return {name: getattr(here, name) for name in GraphFingerprint.__slots__}


# -- filling ----------------------------------------------------------------------------------------------------------


def test_ranks_count_masked_positions_by_their_best_token():
    masked = np.array([[True, False, True, True]])
    assert ranked_positions(masked, np.array([[0.2, 0.9, 0.5, 0.2]])).tolist() == [[2, 0, 3, 1]]


@given(graphs(), blocks())
def test_a_node_shows_the_revealed_tokens_and_its_pairs(graph, case):
    block, candidates = case
    filled = fill(graph, block, candidates, MASK)
    order = ranked_positions(block == MASK, candidates.probabilities[:, :, 0])
    for request, state in enumerate(block):
        able = int((state == MASK).sum())
        for number, pairs in enumerate(graph.nodes):
            chances = [candidates.probabilities[request, order[request, i], j] for i, j in pairs if i < able]
            assert filled.fits[request, number] == (len(chances) == len(pairs) and min(chances) > 0)
            if filled.fits[request, number]:
                expected = state.copy()
                for i, j in pairs:
                    expected[order[request, i]] = candidates.tokens[request, order[request, i], j]
                assert filled.states[request, number].tolist() == expected.tolist()
                local = math.prod(map(float, chances)) ** (1 / len(chances))
                assert filled.local_scores[request, number] == pytest.approx(local)
            else:
                assert filled.local_scores[request, number] == 0


def test_ranks_beyond_the_candidates_do_not_fit():
    candidates = Candidates(np.array([[[1], [2], [3]]]), np.full((1, 3, 1), 0.5, dtype=np.float32))
    filled = fill(CHAIN, np.full((1, 3), MASK), candidates, MASK)
    assert filled.fits.tolist() == [[True, True, True, False]]


# -- pruning ----------------------------------------------------------------------------------------------------------


@given(graphs(), blocks(), st.integers(0, 2**32 - 1))
def test_a_node_is_admitted_only_after_a_parent(graph, case, seed):
    block, candidates = case
    filled = fill(graph, block, candidates, MASK)
    values = np.random.default_rng(seed).choice([0.25, 0.5, 0.75], size=filled.fits.shape)
    order = admission_order(graph, filled, values)
    for request, nodes in enumerate(order):
        admitted = nodes[nodes >= 0].tolist()
        assert (nodes[len(admitted) :] == -1).all()
        for place, number in enumerate(admitted):
            able = [
                n
                for n in range(len(graph))
                if filled.fits[request, n] and n not in admitted[:place] and reached(graph, n, admitted[:place])
            ]
            assert number == max(able, key=lambda n: (values[request, n], -n))
        rest = set(range(len(graph))) - set(admitted)
        assert not any(filled.fits[request, n] and reached(graph, n, admitted) for n in rest)


def reached(graph: DraftGraph, number: int, admitted: list[int]) -> bool:
    return any(parent == ROOT or parent in admitted for parent in graph.parents[number])


@given(graphs(), blocks())
def test_scores_lie_between_local_scores_and_the_best_descendant(graph, case):
    block, candidates = case
    filled = fill(graph, block, candidates, MASK)
    scored = scores(graph, filled)
    assert (scored[~filled.fits] == 0).all()
    for request, number in np.argwhere(filled.fits):
        local = filled.local_scores[request, number]
        children = [scored[request, child] for child in np.flatnonzero(graph.leads[number])]
        best = max(children, default=0) or local
        assert scored[request, number] == pytest.approx(math.sqrt(local * best), rel=1e-5)


# -- lookup -----------------------------------------------------------------------------------------------------------


def test_the_path_goes_from_draft_to_draft_and_ends_at_a_complete_one():
    drafts = [np.array(d) for d in ([1, MASK, MASK], [MASK, 2, MASK], [1, 2, MASK], [1, 2, 3])]
    stepped = [drafts[2], np.array([4, 2, MASK]), drafts[3], drafts[3]]
    assert follow(drafts[0], drafts, stepped, MASK) == [0, 2, 3]
    assert follow(drafts[1], drafts, stepped, MASK) == [1]
    assert follow(np.array([5, MASK, MASK]), drafts, stepped, MASK) == []


@given(st.integers(0, 2**32 - 1))
def test_each_accepted_state_is_the_step_of_the_one_before(seed):
    rng = np.random.default_rng(seed)
    drafts = [np.where(rng.random(3) < 0.5, MASK, rng.integers(0, 2, 3)) for _ in range(8)]
    stepped = [np.where((draft == MASK) & (rng.random(3) < 0.7), 1, draft) for draft in drafts]
    state = root = np.where(rng.random(3) < 0.5, MASK, rng.integers(0, 2, 3))
    path = follow(root, drafts, stepped, MASK)
    for number in path:
        assert (drafts[number] == state).all()
        state = stepped[number]
    assert len(set(path)) == len(path)


# -- calibration ------------------------------------------------------------------------------------------------------


def test_a_trajectory_is_counted_by_ranks_of_the_state_before():
    states = np.array([[MASK, 7, MASK, MASK], [MASK, 7, 5, MASK], [1, 7, 5, MASK], [1, 7, 5, 33]])
    tokens = np.array([[[1, 2], [7, 4], [5, 6], [8, 9]]] * 3)
    first = [[0.25, 0.2], [0.9, 0.1], [0.81, 0.1], [0.5, 0.4]]
    second = [[0.7, 0.2], [0.9, 0.1], [0.6, 0.1], [0.5, 0.4]]
    known = Candidates(tokens, np.array([first, second, second], dtype=np.float32))
    traced = Trajectory(states, known)
    # by the distribution of the forward before the first state: position 2, then 3, then 0
    assert list(following(traced, 0, MASK)) == [node((0, 0)), node((0, 0), (2, 0))]  # 33 was no candidate
    assert list(following(traced, 1, MASK)) == [node((0, 0))]
    assert list(following(traced, 2, MASK)) == []
    counts = NodeCounts()
    counts.add(traced, MASK)
    assert counts.nodes == Counter({node((0, 0)): 2, node((0, 0), (2, 0)): 1})
    assert counts.steps[node(), node((0, 0))] == 2
    assert counts.roots == 3
    assert steps_ahead(CHAIN, counts) == 2 / 3


@given(st.lists(st.deferred(lambda: counted()), max_size=3))
def test_counts_add_up_and_come_back_from_json(parts):
    total = NodeCounts()
    for part in parts:
        total.update(NodeCounts.from_json(json.loads(json.dumps(part.to_json()))))
    assert total.roots == sum(part.roots for part in parts)
    assert total.nodes == sum((part.nodes for part in parts), Counter())
    assert total.steps == sum((part.steps for part in parts), Counter())


@st.composite
def counted(draw: st.DrawFn) -> NodeCounts:
    """Counts of random walks that reveal one or two ranks at a time."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = NodeCounts()
    for _ in range(draw(st.integers(1, 30))):
        before, free = node(), list(range(4))
        counts.roots += 1
        while free and rng.random() < 0.8:
            step = rng.choice(free, size=min(len(free), int(rng.integers(1, 3))), replace=False).tolist()
            free = [i for i in free if i not in step]
            after = before | {(i, int(rng.integers(0, 2))) for i in step}
            counts.nodes[after] += 1
            counts.steps[before, after] += 1
            before = after
    return counts


@given(counted(), st.integers(1, 10), st.sampled_from([None, 1, 2]))
def test_the_chosen_graph_is_connected_and_takes_the_most_counted(counts, size, step_tokens):
    graph = choose(counts, size, step_tokens)

    def leads(before: frozenset[tuple[int, int]], after: frozenset[tuple[int, int]]) -> bool:
        return bool(counts.steps[before, after]) or (before < after and len(after) - len(before) == step_tokens)

    assert len(graph) <= size
    assert set(graph.nodes) <= counts.nodes.keys()
    for after, above in zip(graph.nodes, graph.parents, strict=True):
        nodes = {node() if parent == ROOT else graph.nodes[parent] for parent in above}
        assert nodes == {before for before in (node(), *graph.nodes) if leads(before, after)}
    firsts = [counts.nodes[n] for n in counts.nodes if leads(node(), n)]
    taken = [counts.nodes[n] for n in graph.nodes if leads(node(), n)]
    assert max(firsts, default=0) == max(taken, default=0)


def test_more_frequent_nodes_come_first():
    counts = NodeCounts()
    counts.nodes.update({node((0, 0)): 10, node((0, 0), (1, 0)): 6, node((1, 0)): 7, node((2, 0)): 6})
    for n in counts.nodes:
        counts.steps[node() if len(n) == 1 else node((0, 0)), n] = counts.nodes[n]
    assert set(choose(counts, 2).nodes) == {node((0, 0)), node((1, 0))}  # a rare child is not pulled in by its parent
    assert set(choose(counts, 3).nodes) == {node((0, 0)), node((0, 0), (1, 0)), node((1, 0))}
    assert choose(counts, 3, step_tokens=1).parents == ((ROOT,), (ROOT,), (0, 1))  # legal, though never observed
    assert choose(counts, 3).parents == ((ROOT,), (ROOT,), (0,))
