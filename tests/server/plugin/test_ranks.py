"""Tensor-parallel ranks: what one decides, all do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from running import environment

from outrider.server.plugin.agreement import first_difference

PROGRAM = Path(__file__).parents[2] / "support" / "two_ranks.py"


def decoded(*words: str) -> dict[str, int]:
    path = ":".join(sys.path)
    done = subprocess.run(
        [sys.executable, PROGRAM, *words],
        capture_output=True, text=True, timeout=170, check=False,
        env=environment(PYTHONPATH=path, GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES=""),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_ranks_with_clocks_seeds_and_confidences_of_their_own_agree_at_every_step() -> None:
    told, alone = decoded(), decoded("alone")
    assert told["whole_weights"]  # the first rank's drafter reads them
    assert told["same"] == told["steps"]
    assert told["different_lengths"] > 5  # there was something to agree on
    assert told["verified"] > told["accepted"] > 40
    assert alone["same"] < alone["steps"] / 4  # each by itself, they part


def test_the_first_difference_between_nodes_is_named() -> None:
    first = {"--gamma": 7, "the model": "0f"}
    assert first_difference([(0, first), (0, first), (1, dict(first))]) is None
    message = first_difference([(0, first), (1, first), (2, first | {"--gamma": 5})])
    assert message == "node 2 has 5 for --gamma, node 0 7; start all nodes with the same"
