"""A decode step by graphs asks a GPU for little: counted on one that is not there, where whatever waits raises."""

from pathlib import Path

import pytest
from own_process import found_by_fork

pytestmark = pytest.mark.slow

KINDS = "greedy", "sampled", "filtered", "seeded", "mixed"
MOST, MOST_UNDRAFTED = 17, 3
"""Launches of ours outside graphs; SGLang's own, for its buffers and results, are not among them."""


@pytest.fixture(scope="module")
def found():
    return found_by_fork(Path(__file__).parent / "launches_on_absent_gpu.py")


@pytest.mark.parametrize("requests", [1, 8, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_by_graphs_asks_for_little_whatever_its_requests_want(found, kind, requests):
    """A step with top-k and top-p, which SGLang also says of greedy requests, has its drafts, its acceptance and its
    commit in the graphs, too."""
    assert found["drafted"][f"dspark in graphs, {kind}, {requests}"] <= MOST
    assert found["undrafted"][f"{kind}, {requests}"] <= MOST_UNDRAFTED


@pytest.mark.parametrize("kind", KINDS)
def test_without_graphs_it_asks_for_more(found, kind):
    """Counted are the launches of a drafter with one layer."""
    asked = found["drafted"]
    assert asked[f"dspark in graphs, {kind}, 8"] < asked[f"dspark, {kind}, 8"] / 2


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_answers_that_have_begun_are_graphs_as_well(found, kind):
    """`--initial-tokens` compares lengths of answers, too."""
    asked = found["drafted"]
    assert asked[f"dspark begun in graphs, {kind}, 8"] <= asked[f"dspark in graphs, {kind}, 8"] + 6
