"""Runs the tests of `interpreted/` in a process of their own."""

from pathlib import Path

import pytest
from own_process import pass_interpreted

pytestmark = pytest.mark.slow


def test_attention_backends_through_the_interpreter():
    pass_interpreted(Path(__file__).parent / "interpreted")
