"""Runs tests/gpu/kernels in a separate process, with only torch and Triton."""

from pathlib import Path

import pytest
from own_process import pass_interpreted

pytestmark = pytest.mark.slow

GPU = Path(__file__).parents[2] / "gpu"
ABSENT = "sglang transformers tokenizers huggingface_hub httpx openai fastapi pydantic psutil prometheus_client orjson"


def test_every_kernel_in_the_interpreter():
    pass_interpreted(GPU / "kernels", "--confcutdir", str(GPU), without=ABSENT, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
