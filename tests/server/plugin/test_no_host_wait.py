"""A decode step never waits for a GPU: it runs on a fake one, where waiting raises."""

from pathlib import Path

import pytest
from own_process import found_by_fork

from outrider.server.plugin.decode.warm_up import numbers_of_requests

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found():
    return found_by_fork(Path(__file__).parent / "decode_on_absent_gpu.py")


def test_a_step_never_waits_and_runs_the_same_operations_for_all_lengths(found):
    """There is no copy to the host except after the step, no shape that depends on numbers, and one device."""
    steps = {case: said for case, said in found.items() if not case.startswith(("planted", "late", "forced"))}
    assert len(steps) > 10
    assert {case: said for case, said in steps.items() if not said.get("same")} == {}


def test_text_that_a_grammar_forces_is_drafted_without_a_wait(found):
    assert found["forced"] == {"forced": True}


def test_no_kernel_is_compiled_when_the_server_is_ready(found):
    """This holds for all requests and options."""
    assert {drafter: late for drafter, (_, late) in found["late"].items() if late} == {}
    for left, (_, late) in found["planted late"].items():
        assert late, f"a warm-up without {left} requests would not be found out"


def test_few_kernels_are_compiled_at_the_start(found):
    """Each kernel takes a second or more."""
    assert {drafter: count for drafter, (count, _) in found["late"].items() if not 0 < count <= 40} == {}


def test_the_warm_up_has_a_number_for_every_power_of_two():
    for most in range(1, 200):
        powers = {(number - 1).bit_length() for number in range(1, most + 1)}
        assert {(number - 1).bit_length() for number in numbers_of_requests(most)} == powers, most


@pytest.mark.parametrize("plant", ["item", "cpu", "nonzero", "mask", "upload", "number", "host"])
def test_a_waiting_step_is_detected(found, plant):
    assert found["planted none"]["same"]
    assert "error" in found[f"planted {plant}"], found
