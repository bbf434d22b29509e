"""The start of SGLang's verification graphs."""

from pathlib import Path

import pytest
from own_process import found_by_fork

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found():
    return found_by_fork(Path(__file__).parent / "graph_start_on_cpu.py")


def test_the_forward_that_tunes_flashinfer_verifies_as_many_tokens_of_each_request(found):
    """SGLang's own dummies lack a verification input."""
    assert "'NoneType' object has no attribute 'query_lens'" in found["without"]
    assert found["ours"] == [0, 4, 8, 12, 16, 20]


def test_sglang_captures_no_verification_with_adapters(found):
    """So `gpu_attention.graphs` requests no graphs with adapters."""
    assert "does not support two-batch-overlap, LoRA" in found["adapters"]
