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
    steps = {case: said for case, said in found.items() if not case.startswith(("planted", "late"))}
    assert len(steps) > 10
    assert {case: said for case, said in steps.items() if not said.get("same")} == {}


def test_no_kernel_is_compiled_when_the_server_is_ready(found):
    """Whatever the number of requests and what they want, captures and the warm-up have asked for the same variants."""
    assert {drafter: late for drafter, (_, late) in found["late"].items() if late} == {}
    for left, (_, late) in found["planted late"].items():
        assert late, f"a warm-up without {left} requests would not be found out"


def test_few_kernels_are_compiled_at_the_start(found):
    """Each takes a second or more; that of all drafters' has 80 requests."""
    assert {drafter: count for drafter, (count, _) in found["late"].items() if not 0 < count <= 40} == {}


def test_the_warm_up_has_a_number_for_every_power_of_two():
    for most in range(1, 200):
        powers = {(number - 1).bit_length() for number in range(1, most + 1)}
        assert {(number - 1).bit_length() for number in numbers_of_requests(most)} == powers, most


@pytest.mark.parametrize("plant", ["item", "cpu", "nonzero", "mask", "upload", "number", "host"])
def test_one_that_waited_would_be_found_out(found, plant):
    assert found["planted none"]["same"]
    assert "error" in found[f"planted {plant}"], found
