"""Graphs of prefills: SGLang's own runner with functions as graphs."""

from pathlib import Path

import pytest
from own_process import found_by_fork

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found():
    return found_by_fork(Path(__file__).parent / "prefill_graphs_on_cpu.py")


def test_prefills_bring_hidden_states_by_graphs_where_the_drafter_reads_them(found):
    """A prompt of 1 token and one of 17 have no graph of similar size."""
    assert found["dspark"] == {"replayed": 6, "eager": 2, "captured": 3}


def test_graphs_have_none_where_no_drafter_reads_them(found):
    assert found["ngram"] == found["SGLang's own"] == {"replayed": 0, "eager": 8, "captured": 3}


def test_where_capture_fails_prefills_run_without_graphs(found):
    assert found["failing"] == {"replayed": 0, "eager": 8, "captured": 0}
