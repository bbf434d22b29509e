from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tiny_drafters import CONFIGS

from outrider.drafters.block import BlockConfig


@pytest.fixture(params=sorted(CONFIGS))
def config(request: pytest.FixtureRequest) -> BlockConfig:
    return CONFIGS[request.param]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny operations only lose time in a thread pool."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
