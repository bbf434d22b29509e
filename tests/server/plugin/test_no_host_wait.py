"""A decode step on a GPU waits for nothing: run on one that is not there, where whatever would wait raises."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_process import found_by_fork

from outrider.server.plugin.decode.warm_up import numbers_of_requests

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found():
    return found_by_fork(Path(__file__).parent / "decode_on_absent_gpu.py")


def test_a_step_waits_for_nothing_and_asks_the_same_whatever_the_lengths(found):
    """No copy to the host but those behind the step, no shape by numbers, one device; in two steps each of batches
    whose contexts differ."""
    steps = {case: said for case, said in found.items() if not case.startswith(("planted", "launches", "late"))}
    assert len(steps) > 10
    assert {case: said for case, said in steps.items() if not said.get("same")} == {}


def test_a_sampled_step_by_graphs_asks_for_as_little_as_a_greedy_one(found):
    """A step with top-k and top-p has its drafts, its acceptance and its commit in the graphs, too. Launches without
    graphs are of a drafter with one layer."""
    asked = found["launches"]
    for kind in ("sampled", "seeded", "mixed"):
        assert asked[f"dspark in graphs, {kind}"] <= asked["dspark in graphs, greedy"] + 10, asked
        assert asked[f"dspark in graphs, {kind}"] < asked[f"dspark, {kind}"] / 2, asked


def test_no_kernel_is_compiled_when_the_server_is_ready(found):
    """Whatever the number of requests and what they want, the warm-up has run the same variants before."""
    late = dict(found["late"])
    assert late.pop("planted")
    assert not any(late.values()), late


def test_the_warm_up_has_numbers_of_every_kind():
    """There are an even and an odd one for each power of two that holds them, if such exist."""

    def kinds(numbers):
        return {((number - 1).bit_length(), number % 2) for number in numbers}

    for most in range(1, 200):
        assert kinds(numbers_of_requests(most)) == kinds(range(1, most + 1)), most


@pytest.mark.parametrize("plant", ["item", "cpu", "nonzero", "mask", "upload", "number", "host"])
def test_one_that_waited_would_be_found_out(found, plant):
    assert found["planted none"]["same"]
    assert "error" in found[f"planted {plant}"], found
