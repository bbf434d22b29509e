from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_drafters import CONFIGS, save_target

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


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))
