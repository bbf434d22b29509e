"""Verification graphs: SGLang's own runner with functions as graphs, on a CPU."""

import itertools
from pathlib import Path

import pytest
from own_process import found_by_fork

from outrider.server.settings import gpu_attention


@pytest.fixture(scope="module")
def found():
    return found_by_fork(Path(__file__).parent / "verify_graphs_on_cpu.py")


@pytest.mark.slow
def test_a_replay_equals_each_request_alone(found):
    """In every bucket, with one request up to all."""
    for drafter, said in found.items():
        assert said["replayed"] > 100, drafter
        assert said["full"] > 0, drafter
        assert said["same operations"], drafter


@pytest.mark.slow
def test_the_planners_buckets_are_captured(found):
    """They must have room for SGLang's requests."""
    for said in found.values():
        assert said["captured"] == said["buckets"] == [t for t in said["sizes"] if t <= 20]
        assert said["buffers"] == [6, 20]  # one slot more than requests; as many tokens as the largest graph
        assert said["eager"] > 0


@pytest.mark.slow
def test_logits_take_four_bytes_as_documented(found):
    assert {said["logits"] for said in found.values()} == {5 * 4 * 40 * 4}


@pytest.mark.slow
def test_hidden_states_come_where_the_drafter_wants_them(found):
    assert {drafter: said["hidden"] for drafter, said in found.items()} == {"dspark": "FULL", "ngram": "NULL"}


@pytest.mark.slow
def test_replays_accept_and_commit_batches_and_closed_tails_leave_no_graph(found):
    """Greedy, sampled and seeded requests with lookups among drafts equal steps without graphs."""
    for said in found.values():
        assert said["committed"] > 2 * said["replayed"]


@pytest.mark.slow
def test_a_tail_that_reads_outside_its_batch_is_detected(found):
    assert all(found["dspark"]["faults"].values()), found["dspark"]["faults"]


@pytest.mark.slow
def test_padding_without_a_slot_is_detected(found):
    assert found["dspark"]["without a slot more"] > 0


def test_no_graphs_are_requested_with_adapters():
    assert gpu_attention.graphs("fa3", {}, ranks=1, adapters=True) == {"disable_cuda_graph": True}


PREFILLS = {"cuda_graph_bs_prefill": list(gpu_attention.PREFILLS)}


@pytest.mark.parametrize(
    ("backend", "given", "ranks", "arguments"),
    [
        ("fa3", {}, 1, PREFILLS),
        ("fa3", {"cuda_graph_max_bs_prefill": 64}, 1, {}),
        ("trtllm_mha", {}, 1, PREFILLS),
        ("fa3", {}, 2, PREFILLS),
        ("fa3", {"moe_a2a_backend": "deepep"}, 1, PREFILLS),
        ("fa3", {"moe_a2a_backend": "deepep"}, 2, {"disable_cuda_graph": True}),
        (None, {}, 1, {"disable_cuda_graph": True}),
    ],
)
def test_graphs_are_requested_when_steps_have_buckets(backend, given, ranks, arguments):
    assert gpu_attention.graphs(backend, given, ranks=ranks) == arguments


def test_graphs_of_prefills_have_little_padding():
    """No graph has more than twice the size; from 512 tokens on, less than a fifth is padding."""
    for below, size in itertools.pairwise(gpu_attention.PREFILLS):
        assert size <= 2 * below
        assert size <= 512 or size - below - 1 < size / 5
