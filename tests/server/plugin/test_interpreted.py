from pathlib import Path

import pytest
from own_process import pass_interpreted

pytestmark = pytest.mark.slow


def test_attention_backends_in_the_interpreter():
    pass_interpreted(Path(__file__).parent / "interpreted")
