"""A decode step on a GPU waits for nothing: run on one that is not there, where whatever would wait raises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def found():
    run = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "decode_on_absent_gpu.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_a_step_waits_for_nothing_and_asks_the_same_whatever_the_lengths(found):
    """No copy to the host but those behind the step, no shape by numbers, one device; in two steps each of batches
    whose contexts differ."""
    steps = {case: said for case, said in found.items() if not case.startswith("planted")}
    assert len(steps) > 10
    assert {case: said for case, said in steps.items() if not said.get("same")} == {}


@pytest.mark.parametrize("plant", ["item", "cpu", "nonzero", "mask", "upload"])
def test_one_that_waited_would_be_found_out(found, plant):
    assert found["planted none"]["same"]
    assert "error" in found[f"planted {plant}"], found
