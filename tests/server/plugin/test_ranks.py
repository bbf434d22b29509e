"""Tensor-parallel ranks follow one rank's decisions."""

import logging
from pathlib import Path

import pytest
from own_process import found_by_fork

from outrider.scheduler.buckets import TokenBuckets
from outrider.server.plugin.node_consistency import first_difference
from outrider.server.processes.process import PEER_GONE, FailureFilter, StartupReport

PROGRAM = Path(__file__).parents[2] / "support" / "two_ranks.py"


@pytest.mark.slow
def test_ranks_with_different_clocks_seeds_and_confidences_agree_at_every_step() -> None:
    worlds = {found["world"]: found for found in found_by_fork(PROGRAM)}
    alone = worlds.pop("alone")
    assert alone["same"] < alone["steps"] / 4  # without communication they diverge
    for told in worlds.values():
        assert told["same"] == told["steps"]
        assert told["different_lengths"] > 5
        assert told["verified"] > told["accepted"] > 40
        assert told["whole_weights"]  # the first rank's drafter reads them
        assert any(sign in told["gone"] for sign in PEER_GONE), told["gone"]
        part = told["world"].partition(" fails")[0]
        failed = told["world"] != part
        assert told["failures"] == ({part: 1} if failed else {})
        assert any(told["last"]) != failed  # no rank waits, and verification stops
    with_buckets = [told for name, told in worlds.items() if name in ("greedy", "drafting fails") or "buckets" in name]
    sizes = set(TokenBuckets(6, 5).sizes)
    assert all(set(told["sizes"]) <= sizes and len(told["sizes"]) > 1 for told in with_buckets)
    assert all(told["accepted_by_graphs"] == told["steps"] - 1 for told in with_buckets)


def test_a_lost_rank_is_named_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    report, logger = StartupReport(tmp_path / "failure"), logging.getLogger("of.a.scheduler")
    report.started()
    logger.addFilter(FailureFilter(report, verbose=False))
    logger.error(
        "Scheduler hit an exception: %s", "Traceback\n  File\nRuntimeError: [pair.cc] Connection closed by peer"
    )
    assert caplog.messages == ["another rank of the engine is gone (RuntimeError: [pair.cc] Connection closed by peer)"]
    logger.error("Scheduler hit an exception: %s", "Traceback\n  File\nKeyError: 1")
    assert "Traceback" in caplog.messages[1]


def test_the_first_difference_between_nodes_is_named() -> None:
    first = {"--gamma": 7, "the model": "0f"}
    assert first_difference([(0, first), (0, first), (1, dict(first))]) is None
    message = first_difference([(0, first), (1, first), (2, first | {"--gamma": 5})])
    assert message == "node 2 has 5 for --gamma, node 0 7; start all nodes with the same"
