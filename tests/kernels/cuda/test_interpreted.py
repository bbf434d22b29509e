"""Runs the tests of tests/gpu/kernels in a process of their own."""

from pathlib import Path

from own_process import pass_interpreted


def test_every_kernel_through_the_interpreter():
    pass_interpreted(Path(__file__).parents[2] / "gpu" / "kernels")
