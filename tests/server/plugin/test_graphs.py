"""Graphs: SGLang's own runners with functions as graphs, on a CPU."""

import itertools
from pathlib import Path

import pytest
from own_process import found_by_fork

from outrider.server.settings import gpu_attention


@pytest.fixture(scope="module")
def verified():
    return found_by_fork(Path(__file__).parent / "verify_graphs_on_cpu.py")


@pytest.fixture(scope="module")
def started():
    return found_by_fork(Path(__file__).parent / "graph_start_on_cpu.py")


@pytest.fixture(scope="module")
def prefilled():
    return found_by_fork(Path(__file__).parent / "prefill_graphs_on_cpu.py")


@pytest.mark.slow
def test_a_replay_equals_each_request_alone(verified):
    """In every bucket, with one request up to all."""
    for drafter, said in verified.items():
        assert said["replayed"] > 100, drafter
        assert said["full"] > 0, drafter
        assert said["same operations"], drafter


@pytest.mark.slow
def test_the_planners_buckets_are_captured(verified):
    """They must have room for SGLang's requests."""
    for said in verified.values():
        assert said["captured"] == said["buckets"] == [t for t in said["sizes"] if t <= 20]
        assert said["buffers"] == [6, 20]  # one slot more than requests; as many tokens as the largest graph
        assert said["eager"] > 0


@pytest.mark.slow
def test_logits_take_four_bytes_as_documented(verified):
    assert {said["logits"] for said in verified.values()} == {5 * 4 * 40 * 4}


@pytest.mark.slow
def test_hidden_states_come_where_the_drafter_wants_them(verified):
    assert {drafter: said["hidden"] for drafter, said in verified.items()} == {"dspark": "FULL", "ngram": "NULL"}


@pytest.mark.slow
def test_replays_accept_and_commit_batches_and_closed_tails_leave_no_graph(verified):
    """Greedy, sampled and seeded requests with lookups among drafts equal steps without graphs."""
    for said in verified.values():
        assert said["committed"] > 2 * said["replayed"]


@pytest.mark.slow
def test_a_tail_that_reads_outside_its_batch_is_detected(verified):
    assert all(verified["dspark"]["faults"].values()), verified["dspark"]["faults"]


@pytest.mark.slow
def test_padding_without_a_slot_is_detected(verified):
    assert verified["dspark"]["without a slot more"] > 0


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


@pytest.mark.slow
def test_the_forward_that_tunes_flashinfer_verifies_as_many_tokens_of_each_request(started):
    """SGLang's own dummies lack a verification input."""
    assert "'NoneType' object has no attribute 'ragged_verify_layout'" in started["without"]
    assert started["ours"] == [0, 4, 8, 12, 16, 20]


@pytest.mark.slow
def test_sglang_captures_no_verification_with_adapters(started):
    """So `gpu_attention.graphs` requests no graphs with adapters."""
    assert "does not support two-batch-overlap, LoRA" in started["adapters"]


@pytest.mark.slow
def test_prefills_bring_hidden_states_by_graphs_where_the_drafter_reads_them(prefilled):
    """A prompt of 1 token and one of 17 have no graph of similar size."""
    assert prefilled["dspark"] == {"replayed": 6, "eager": 2, "captured": 3}


@pytest.mark.slow
def test_graphs_have_none_where_no_drafter_reads_them(prefilled):
    assert prefilled["ngram"] == prefilled["SGLang's own"] == {"replayed": 0, "eager": 8, "captured": 3}


@pytest.mark.slow
def test_where_capture_fails_prefills_run_without_graphs(prefilled):
    assert prefilled["failing"] == {"replayed": 0, "eager": 8, "captured": 0}
